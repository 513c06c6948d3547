from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.models.tiny_directory import tiny_directory

from benchmarks.kv.quality import log_softmax, losses, measure, read, store


def test_losses_of_known_distributions() -> None:
    p, q = np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]), np.array([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]])
    pair = np.log(p).astype(np.float32) + 3, np.log(q).astype(np.float32)
    found = losses(iter([pair]), [0, 0, 1], skip=0)
    assert found["mean_kl"] == pytest.approx((0.5 * np.log(2) - 0.25 * np.log(2)) / 2, rel=1e-5)
    assert (found["same_top"], found["tokens"]) == (0.5, 2)
    assert found["perplexity"] == pytest.approx(np.sqrt(2), rel=1e-5)
    assert losses(iter([pair]), [0, 0, 1], skip=1)["mean_kl"] == pytest.approx(0, abs=1e-6)


def test_log_softmax_of_large_logits() -> None:
    found = log_softmax(np.array([[1e4, 1e4 - 1]], np.float32))
    assert found == pytest.approx(np.array([[-0.31326, -1.31326]]), rel=1e-4)


def test_results_replace_earlier_ones_of_the_same_cache(tmp_path: Path) -> None:
    model, path, ids = tiny_directory(tmp_path / "tiny"), tmp_path / "quality.csv", [5, 6, 7, 8] * 40
    (row,) = measure("tiny", model, ids, ("8",), lambda text: None)
    assert (row["cache"], row["bits"], row["tokens"]) == ("8", "8.5", "96")
    assert 0 <= float(row["mean_kl"]) < 0.1
    for kl in ("0.5", "0.25"):
        store(row | {"mean_kl": kl}, path)
    store(row | {"engine": "mlx-lm"}, path)
    assert [(each["engine"], each["mean_kl"]) for each in read(path)] == [("mlxinfer", "0.25"), ("mlx-lm", row["mean_kl"])]
