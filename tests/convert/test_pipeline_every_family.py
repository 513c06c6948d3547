"""Every family converts block by block within little memory, with the result of a conversion in one piece."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.models.checkpoints import config_of, random_checkpoint
from support.models.families import GOLDEN, NAMES

from mlxinfer import LLM
from mlxinfer.convert import convert, pipeline
from mlxinfer.convert.calibrate.texts import Calibration
from mlxinfer.convert.report import Report
from mlxinfer.evaluation.measure import streamed_logits
from mlxinfer.evaluation.probabilities import kl_divergence, logprobs_of
from mlxinfer.evaluation.texts import Window, Windows

pytestmark = pytest.mark.long

IDS = np.random.default_rng(3).integers(3, 96, 90).tolist()
TEXTS = Calibration(tuple(map(tuple, np.random.default_rng(0).integers(3, 96, (20, 40)).tolist())), "some")
LIMIT_GB = 0.2
LOST = 0.015
"""Largest KL divergence of eight bits here, in nats."""
AT_ONCE = 100
"""Tokens that pass a block at once under the memory limit."""


@pytest.fixture(autouse=True)
def _few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BATCH", "IMPORTANCE_BATCH"):
        monkeypatch.setattr(pipeline, name, AT_ONCE)


def source_of(name: str, folder: Path) -> Path:
    """Return the golden checkpoint, or one with wider matrices if groups of 32 do not divide its columns."""
    matrices = [array for array in mx.load(str(GOLDEN / name / "model.safetensors")).values() if array.ndim == 2]
    if sum(matrix.shape[1] % 32 == 0 for matrix in matrices) > len(matrices) / 2:
        return GOLDEN / name
    heads = {"num_attention_heads": 8} if name == "phi3_longrope" else {}  # its factors are for heads of 8 channels
    return random_checkpoint(folder / "source", config_of(name, **heads))


def whole(path: Path) -> mx.array:
    with LLM(path, dtype="float32") as llm:
        return llm.logits(IDS)


def kl(exact: mx.array, other: mx.array) -> float:
    return float(mx.mean(kl_divergence(logprobs_of(exact), logprobs_of(other))).item())


def converted(source: Path, target: Path, encoder: str, **settings: object) -> Report:
    calibration = TEXTS if encoder == "gptq" else None
    return convert(source, target, bits=8, group_size=32, encoder=encoder, calibration=calibration, measure=False, **settings)


@pytest.mark.parametrize("encoder", ["fit", "gptq"])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_converted_in_small_pieces(name: str, encoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is as good as that of one piece."""
    source, small = source_of(name, tmp_path), tmp_path / "small"
    report = converted(source, small, encoder, max_memory=LIMIT_GB)
    exact, logits = whole(source), whole(small)
    windows = Windows((Window(tuple(IDS), 0), Window(tuple(IDS[:5]), 1)), "some")
    streamed = mx.concatenate(list(streamed_logits(small, windows, mx.float32)))[: len(IDS)]
    assert mx.abs(streamed - logits).max().item() < 2e-3 * mx.abs(logits).max().item()
    assert kl(exact, logits) < LOST
    for tokens in ("BATCH", "IMPORTANCE_BATCH"):
        monkeypatch.setattr(pipeline, tokens, 1 << 20)
    near = 0.3 if encoder == "gptq" else 0.05  # GPTQ may keep the fit if both lose about the same
    at_once = converted(source, tmp_path / "whole", encoder)
    assert any(tensor.weighted_error for tensor in report.tensors)
    for one, other in zip(report.tensors, at_once.tensors, strict=True):
        assert (one.name, one.stored) == (other.name, other.stored)
        assert (one.error or 0) == pytest.approx(other.error or 0, rel=near, abs=1e-5), one.name
        assert (one.weighted_error or 0) == pytest.approx(other.weighted_error or 0, rel=near, abs=1e-5), one.name
