"""Sums and norms between the parts of a model as one kernel: the same logits, fewer launches, and plain MLX where the kernel fails."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.emulated import needs_emulator
from support.plain_step import PlainCache
from support.plain_weights import PlainWeights
from support.tiny_engine import GOLDEN

from mlxinfer.kernels_metal import emulator
from mlxinfer.kernels_metal.executors import run_with
from mlxinfer.models import build
from mlxinfer.models.decoder import Decoder
from mlxinfer.nn import residual
from mlxinfer.nn.norms import RMSNorm

TOKENS = [(7 * i + 3) % 96 for i in range(9)]
LAUNCHES = Counter[str]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[LAUNCHES]:
    """Kernels as on a GPU, in the emulator; how often each was launched, and how often a norm was computed by MLX."""
    found: LAUNCHES = Counter()
    monkeypatch.delenv(residual.SWITCH, raising=False)
    monkeypatch.setattr(residual, "is_gpu", lambda: True)
    norm = RMSNorm.__call__
    monkeypatch.setattr(RMSNorm, "__call__", lambda self, *args, **named: (found.update(["norm"]), norm(self, *args, **named))[1])

    def maker(*, name: str, **rest: Any) -> Callable[..., list[mx.array]]:
        kernel = emulator.metal_kernel(name=name, **rest)
        return lambda **call: (found.update([name]), kernel(**call))[1]

    residual._tried.cache_clear()
    with run_with(maker):
        yield found
    residual._tried.cache_clear()


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
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gemma2", "granite", "olmo2", "qwen3_moe", "qwen3_next", "gpt_oss"])
def test_the_same_logits(name: str, launches: LAUNCHES, monkeypatch: pytest.MonkeyPatch) -> None:
    joined = model_of(name)
    assert all(run.joined for run in joined.runs)
    assert not any("sums with norms" in note for note in joined.notes)
    launches.clear()
    got = logits_of(joined)
    assert launches["add_norm"] > 0
    monkeypatch.setattr(residual, "is_gpu", lambda: False)
    plain = model_of(name)
    assert not any(run.joined for run in plain.runs)
    np.testing.assert_allclose(got, logits_of(plain), rtol=1e-4, atol=1e-4)


@needs_emulator
@pytest.mark.parametrize(("name", "norms_of_heads"), [("llama", 0), ("gemma3_text", 2)])
def test_two_launches_a_layer(name: str, norms_of_heads: int, launches: LAUNCHES) -> None:
    """Both sums, and all norms but those of heads, the first layer's first one excepted."""
    model = model_of(name)
    logits_of(model)
    launches.clear()
    step = PlainCache(model.layers).step([(0, 1)])
    mx.eval(model.hidden(mx.array([5], mx.int32), step))
    layers = len(model.blocks)
    assert launches == {"add_norm": 2 * layers, "norm": 1 + norms_of_heads * layers}


@pytest.mark.parametrize("wrong", ["crash", "answers"])
def test_a_kernel_that_fails_its_trial_is_not_used(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = logits_of(model_of("llama"))

    def broken(**_: Any) -> Callable[..., list[mx.array]]:
        def call(*, output_shapes, output_dtypes, **_: Any) -> list[mx.array]:  # type: ignore[no-untyped-def]
            if wrong == "crash":
                raise RuntimeError("Unable to build metal library from source\nerror: no")
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return call

    monkeypatch.setattr(residual, "is_gpu", lambda: True)
    monkeypatch.delenv(residual.SWITCH, raising=False)
    residual._tried.cache_clear()
    with run_with(broken):
        reason = residual.why_unsupported(mx.float32, 64, after=False)
        assert reason is not None
        assert "\n" not in reason
        assert "failed their trial" in reason
        model = model_of("llama")
        assert any("sums with norms: plain MLX instead" in note for note in model.notes)
        np.testing.assert_allclose(logits_of(model), plain, rtol=1e-5, atol=1e-5)
        monkeypatch.setenv(residual.SWITCH, "0")
        assert not residual.in_use()
    residual._tried.cache_clear()
