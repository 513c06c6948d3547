"""Every family with experts computes few rows by the kernels: the same logits as with plain MLX."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.engines.tiny_engine import GOLDEN
from support.kernels.emulated import counting, needs_emulator
from support.models.plain_weights import PlainWeights, RandomWeights
from support.oracles.plain_step import PlainCache

from mlxinfer.kernels_metal import kernel_trial
from mlxinfer.kernels_metal.experts import trial
from mlxinfer.kernels_metal.experts.trial import FEW
from mlxinfer.kernels_metal.kernel_trial import SWITCH, Speed
from mlxinfer.models import build
from mlxinfer.models.decoder import Decoder
from mlxinfer.nn import few_row_experts
from mlxinfer.nn.moe import try_mixture
from mlxinfer.nn.packing import objects
from mlxinfer.nn.weights import Format

TOKENS = [(7 * i + 3) % 96 for i in range(9)]
FAMILIES = [
    *("deepseek_v2", "deepseek_v3", "ernie4_5_moe", "gemma4_text_experts", "glm4_moe", "glm4_moe_lite", "gpt_oss", "granitemoehybrid"),
    *("kimi_linear", "lfm2_moe", "minimax_m2", "mistral4", "mixtral", "nemotron_h_experts", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next"),
]
WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size", "moe_latent_size", "moe_shared_expert_intermediate_size")
"""Settings that become multiples of 32, as in every published model."""


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Experts as on a GPU, in the emulator; how often each kernel was launched."""
    found: Counter[str] = Counter()
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(few_row_experts, "is_gpu", lambda: True)
    monkeypatch.setattr(few_row_experts, "in_use", lambda: True)
    monkeypatch.setattr(few_row_experts.TRIAL, "verdicts", {})
    monkeypatch.setattr(trial, "speeds", lambda subject: {1: Speed(1.2), FEW: Speed(1.2)})

    with counting(found):
        yield found
    for each in kernel_trial.TRIALS:
        each.forget()


def logits_of(model: Decoder) -> np.ndarray:
    """Logits of six rows, and then of one row at a time."""
    cache, rows = PlainCache(model.layers), []
    for tokens in (TOKENS[:6], *([token] for token in TOKENS[6:])):
        step = cache.step([(0, len(tokens))])
        rows.append(np.array(model.logits(model.hidden(mx.array(tokens, mx.int32), step))))
    return np.concatenate(rows)


def built(config: dict[str, Any], weights: Any) -> Decoder:
    model = build(config, weights)
    assert isinstance(model, Decoder)
    return model


def wide(config: dict[str, Any]) -> dict[str, Any]:
    return {name: -(-value // 32) * 32 if name in WIDTHS and value else value for name, value in config.items()}


def compare(model: Decoder, launches: Counter[str], kernels: set[str]) -> None:
    expected = logits_of(model)
    assert not {*launches} & kernels
    for part in list(objects(model.blocks)):
        try_mixture(part, mx.float32)
    assert few_row_experts.TRIAL.verdicts
    assert few_row_experts.TRIAL.lost() == []
    launches.clear()
    found = logits_of(model)
    assert {name for name in launches if "experts" in name} == kernels
    assert 0 < launches[next(iter(kernels))] / 4 <= len(model.blocks)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-4)


@needs_emulator
@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_logits_with_quantized_experts(name: str, launches: Counter[str]) -> None:
    mxfp4 = name == "gpt_oss"
    form = Format(4, 32, "mxfp4") if mxfp4 else Format(4, 32)
    config = wide(json.loads((GOLDEN / name / "config.json").read_text()))
    weights = RandomWeights(lambda name: form if "expert" in name or "switch" in name else None)
    mode = "mxfp4" if mxfp4 else "affine"
    compare(built(config, weights), launches, {f"{mode}_experts_in", f"{mode}_experts_out"})


@needs_emulator
@pytest.mark.parametrize("name", ["glm4_moe", "gemma4_text_experts", "granitemoehybrid", "lfm2_moe", "minimax_m2"])
def test_the_golden_logits(name: str, launches: Counter[str]) -> None:
    """The other golden models have widths that the kernels do not multiply."""
    folder = GOLDEN / name
    model = built(json.loads((folder / "config.json").read_text()), PlainWeights.open(folder / "model.safetensors"))
    compare(model, launches, {"plain_experts_in", "plain_experts_out"})
