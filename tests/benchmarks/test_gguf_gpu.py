"""The stored measurements of GGUF's types on a GPU: within what is promised, and what users are told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import gguf_gpu
from benchmarks.gguf_gpu import KINDS, Row, keep, read, table
from benchmarks.options import RESULTS
from mlxinfer.loading.gguf.mlx_formats import PACKINGS
from tests.support.formats.tiny_kquants import random_blocks, write_tiny_kquants

MEASURED = read(RESULTS / "gguf_gpu.csv")
MOST = {"Q4_K": 1e-4, "Q5_K": 1e-4, "Q6_K": 2e-3}
DOCS = RESULTS.parents[1] / "docs"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_measured_is_what_users_are_told(kind: str) -> None:
    rows = [row for row in MEASURED if row.kind == kind]
    assert {row.model for row in rows} == {"smollm2", "gemma3-270m"}
    highest = max(row.mean_kl for row in rows)
    assert PACKINGS[kind].loss == pytest.approx(highest, rel=0.03)
    assert highest < MOST.get(kind, 1)
    assert f"| {PACKINGS[kind].loss:.1e} |" in (DOCS / "gguf.md").read_text(encoding="utf-8")


def test_the_table_is_in_the_documentation() -> None:
    assert table(MEASURED) == (RESULTS / "gguf_gpu.md").read_text(encoding="utf-8")
    assert table(MEASURED) in (DOCS / "gguf.md").read_text(encoding="utf-8")


def test_results_replace_what_was_measured_before(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    for kl in (0.5, 0.25):
        keep([Row("a model", "Q4_K", 4.5, 5.0, 0.1, kl, 0.9, 2.0, 0.951, 338)], path)
    keep([Row("a model", "Q6_K", 6.5625, 9.0, 0.1, 0.125, 0.9, 2.0, 1.0, 338)], path)
    assert [(row.kind, row.mean_kl, row.tokens) for row in read(path)] == [("Q4_K", 0.25, 338), ("Q6_K", 0.125, 338)]
    assert "| a model | Q4_K | 4.5 | 5 | 1.0e-01 | 2.5e-01 | 9.0e-01 | 2.0e+00 | 95.1% |" in table(read(path))


def test_a_model_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks that are not llama.cpp's: any will do to compare with their copy on a GPU."""

    def blocks(numbers: np.ndarray, kind: str) -> np.ndarray:
        return random_blocks(kind, 1, numbers.size, np.random.default_rng(numbers.size)).reshape(-1, 144)

    monkeypatch.setattr(gguf_gpu, "quantize", blocks)
    monkeypatch.setattr(gguf_gpu, "_pages", lambda path, tokens: [list(range(3, 3 + tokens))])
    [row] = gguf_gpu.measure("tiny", write_tiny_kquants(tmp_path / "k.gguf"), ("Q4_K",), tokens=40)
    assert (row.model, row.kind, row.file_bits, row.gpu_bits, row.tokens) == ("tiny", "Q4_K", 4.5, 5, 10)
    assert 0 < row.mean_kl < 1e-3 < row.own_kl
