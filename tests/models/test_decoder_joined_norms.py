"""Sums and norms between the parts of a model as one kernel: the same logits, fewer launches, and plain MLX where the kernel fails."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.engines.tiny_engine import GOLDEN, request, run
from support.kernels.emulated import counting, needs_emulator
from support.models.plain_weights import PlainWeights, pack
from support.oracles.plain_step import PlainCache

from mlxinfer.config import EngineConfig
from mlxinfer.engine.core.engine import Engine
from mlxinfer.kernels_metal import kernel_trial
from mlxinfer.kernels_metal.executors import Launch, run_with
from mlxinfer.kernels_metal.kernel_trial import SWITCH
from mlxinfer.models import build
from mlxinfer.models.decoder import Decoder
from mlxinfer.nn import residual_stream as residual
from mlxinfer.nn.norms import RMSNorm
from mlxinfer.nn.weights import Format

GEMMA4 = ["gemma4_text", "gemma4_text_shared", "gemma4_text_experts"]
TOKENS = [(7 * i + 3) % 96 for i in range(9)]
LAUNCHES = Counter[str]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[LAUNCHES]:
    """Kernels as on a GPU, in the emulator; how often each was launched, and how often a norm was computed by MLX."""
    found: LAUNCHES = Counter()
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(kernel_trial, "has_gpu_kernels", lambda: True)
    norm = RMSNorm.__call__
    monkeypatch.setattr(RMSNorm, "__call__", lambda self, *args, **named: (found.update(["norm"]), norm(self, *args, **named))[1])

    residual.TRIAL.forget()
    with counting(found):
        yield found
    residual.TRIAL.forget()


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
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gemma2", "granite", "olmo2", "qwen3_moe", "qwen3_next", "gpt_oss", *GEMMA4])
def test_the_same_logits(name: str, launches: LAUNCHES, monkeypatch: pytest.MonkeyPatch) -> None:
    joined = model_of(name)
    assert joined.joined
    assert not any("sums with norms" in note for note in joined.notes)
    launches.clear()
    got = logits_of(joined)
    assert launches["add_norm"] > 0
    monkeypatch.setattr(kernel_trial, "has_gpu_kernels", lambda: False)
    plain = model_of(name)
    assert not plain.joined
    np.testing.assert_allclose(got, logits_of(plain), rtol=1e-4, atol=1e-4)


@needs_emulator
def test_kernels_add_the_biases_of_quantized_projections(launches: LAUNCHES, monkeypatch: pytest.MonkeyPatch) -> None:
    def quantized() -> Decoder:
        model = model_of("gpt_oss")
        for block in model.blocks:
            mixer: Any = block.mixer  # type: ignore[attr-defined]
            for linear in (*mixer.qkv.linears, mixer.output):
                assert linear.bias is not None
                linear.matrix = pack(linear.matrix.weight, Format(4, 16, "nvfp4"))
        return model

    got = logits_of(quantized())
    assert (mx.float32, 48, False, True, True) in residual.TRIAL.verdicts
    monkeypatch.setattr(kernel_trial, "has_gpu_kernels", lambda: False)
    np.testing.assert_allclose(got, logits_of(quantized()), rtol=1e-4, atol=1e-4)


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


@needs_emulator
@pytest.mark.parametrize(("name", "sums"), [("gemma4_text", 2), ("gemma4_text_shared", 3), ("gemma4_text_experts", 3)])
def test_sums_that_no_norm_follows_are_fused_too(name: str, sums: int, launches: LAUNCHES) -> None:
    """Before per-layer inputs, and of the MLP's and the experts' results. Their kernel is tried at load."""
    model = model_of(name)
    hidden = model.norm.weight.size
    assert ((mx.float32, hidden, True, False) in residual.TRIAL.verdicts) == (sums == 3)
    tried = set(residual.TRIAL.verdicts)
    launches.clear()
    mx.eval(model.hidden(mx.array([5], mx.int32), PlainCache(model.layers).step([(0, 1)])))
    assert launches["add_norm"] == sums * len(model.blocks)
    assert set(residual.TRIAL.verdicts) == tried


@pytest.mark.parametrize("wrong", ["crash", "answers"])
def test_a_kernel_that_fails_its_trial_is_not_used(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = logits_of(model_of("llama"))

    def broken(**_: Any) -> Callable[..., list[mx.array]]:
        def call(*, output_shapes, output_dtypes, **_: Any) -> list[mx.array]:  # type: ignore[no-untyped-def]
            if wrong == "crash":
                raise RuntimeError("Unable to build metal library from source\nerror: no")
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return call

    monkeypatch.setattr(kernel_trial, "has_gpu_kernels", lambda: True)
    monkeypatch.delenv(SWITCH, raising=False)
    residual.TRIAL.forget()
    with run_with(broken):
        reason = residual.TRIAL.obstacle(mx.float32, 64, False, True)
        assert reason is not None
        assert "\n" not in reason
        assert "failed its trial" in reason
        model = model_of("llama")
        assert any(note.startswith("sums with norms, ") and "normed, float32: plain MLX instead" in note for note in model.notes)
        np.testing.assert_allclose(logits_of(model), plain, rtol=1e-5, atol=1e-5)
        monkeypatch.setenv(SWITCH, "0")
        assert not kernel_trial.kernels_in_use()
    residual.TRIAL.forget()


@needs_emulator
def test_a_kernel_that_fails_later_is_given_up(launches: LAUNCHES, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine computes the step again without it; another kernel that is sound stays."""
    other = kernel_trial.KernelTrial("other", lambda: None)
    assert other.obstacle() is None
    engine = Engine(model_of("llama"), EngineConfig(max_context=256, kv_cache_tokens=2048, max_num_batched_tokens=64), dtype=mx.float32)
    prompt = [(5 * i + 3) % 96 for i in range(20)]
    whole = run(engine, [request(prompt, 12)])
    working, launch = dict(launches), Launch.run

    def failing(self: Launch, inputs: Any) -> Any:
        if self.name == "add_norm" and launches["add_norm"] > working["add_norm"] + 9:
            raise RuntimeError("[METAL] Command buffer execution failed: Caused GPU Timeout Error")
        return launch(self, inputs)

    monkeypatch.setattr(Launch, "run", failing)
    assert run(engine, [request(prompt, 12)]) == whole
    assert [line.split(",")[0] for line in kernel_trial.lost_lines()] == ["sums with norms"]
    assert "GPU Timeout" in kernel_trial.lost_lines()[0]
    assert other.obstacle() is None
    assert other.disable(ValueError("no"), guilty=False)
    assert other.obstacle() is not None
    kernel_trial.TRIALS.remove(other)
