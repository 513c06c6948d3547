"""Every family with experts chooses them by the kernel: the same logits as with plain MLX."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from support.engines.tiny_engine import GOLDEN
from support.kernels.emulated import counting, needs_emulator
from support.models.plain_weights import PlainWeights
from support.oracles.plain_step import PlainCache

from mlxinfer.kernels_metal import kernel_trial
from mlxinfer.kernels_metal.kernel_trial import SWITCH
from mlxinfer.models import build
from mlxinfer.models.decoder import Decoder
from mlxinfer.nn import routes

TOKENS = [(7 * i + 3) % 96 for i in range(9)]
FAMILIES = [
    *("deepseek_v2", "deepseek_v3", "ernie4_5_moe", "gemma4_text_experts", "glm4_moe", "glm4_moe_lite", "gpt_oss", "granitemoehybrid"),
    *("kimi_linear", "lfm2_moe", "minimax_m2", "mistral4", "mixtral", "nemotron_h_experts", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next"),
]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Kernels as on a GPU, in the emulator, and how often each was launched."""
    found: Counter[str] = Counter()
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(kernel_trial, "has_gpu_kernels", lambda: True)

    with counting(found):
        yield found
    for trial in kernel_trial.TRIALS:
        trial.forget()


def model_of(name: str) -> Decoder:
    folder = GOLDEN / name
    model = build(json.loads((folder / "config.json").read_text()), PlainWeights.open(folder / "model.safetensors"))
    assert isinstance(model, Decoder)
    return model


def logits_of(model: Decoder) -> np.ndarray:
    cache, rows = PlainCache(model.layers), []
    for tokens in (TOKENS[:6], *([token] for token in TOKENS[6:])):
        step = cache.step([(0, len(tokens))])
        rows.append(np.array(model.logits(model.hidden(mx.array(tokens, mx.int32), step))))
    return np.concatenate(rows)


@needs_emulator
@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_logits(name: str, launches: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(name)
    assert not any("choices of experts" in note for note in model.notes)
    assert routes.TRIAL.verdicts  # tried at load
    launches.clear()
    got = logits_of(model)
    sparse = launches["router"] / 4
    assert 0 < sparse <= len(model.blocks)
    monkeypatch.setattr(kernel_trial, "has_gpu_kernels", lambda: False)
    np.testing.assert_allclose(got, logits_of(model_of(name)), rtol=1e-4, atol=1e-4)
