from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks.kv.quality import Row, keep, read, table, together
from benchmarks.loss import Comparison, Loss, log_softmax


def test_loss_of_known_distributions() -> None:
    p, q = np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]), np.array([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]])
    comparison = Comparison()
    comparison.add(np.log(p).astype(np.float32) + 3, np.log(q).astype(np.float32), [0, 1])
    loss = comparison.loss()
    assert loss.mean_kl == pytest.approx((0.5 * np.log(2) - 0.25 * np.log(2)) / 2, rel=1e-5)
    assert (loss.same_top, loss.tokens) == (0.5, 2)
    assert loss.perplexity == pytest.approx(np.sqrt(2), rel=1e-5)
    assert comparison.loss(skip=1).mean_kl == pytest.approx(0, abs=1e-6)


def test_log_softmax_of_large_logits() -> None:
    found = log_softmax(np.array([[1e4, 1e4 - 1]], np.float32))
    assert found == pytest.approx(np.array([[-0.31326, -1.31326]]), rel=1e-4)


def test_rows_come_together_whatever_their_pieces() -> None:
    rows = np.arange(20, dtype=np.float32)[:, None]

    def pieces(*sizes: int):
        edges = np.cumsum([0, *sizes])
        return (rows[a:b] for a, b in pairwise(edges))

    pairs = list(together(pieces(7, 7, 6), pieces(3, 12, 5)))
    assert all((mine == other).all() and len(mine) for mine, other in pairs)
    assert (np.concatenate([mine for mine, _ in pairs]) == rows).all()


def test_results_replace_what_was_measured_before(tmp_path: Path) -> None:
    path = tmp_path / "quality.csv"
    for kl in (0.5, 0.25):
        keep(Row("a model", 1024, "mlxinfer", "4", 4.5, Loss(960, kl, 0.9, 2.0, 0.951, 1.008)), path)
    keep(Row("a model", 1024, "mlx-lm", "4", 4.5, Loss(960, 0.1, 0.9, 2.0, 0.9, 1.1)), path)
    assert [(row["engine"], row["mean_kl"]) for row in read(path)] == [("mlxinfer", "0.25"), ("mlx-lm", "0.1")]
    assert "| mlxinfer | 4 | 4.5 | 0.25 | 0.9 | 95.1% | x1.008 |" in table(read(path))
