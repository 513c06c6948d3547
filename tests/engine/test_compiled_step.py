"""Steps that MLX replays: the same tokens as without, few traces, and pools that stay where they are."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support.tiny_engine import request, run, tiny_engine
from support.traceable_attention import TraceableAppend

from mlxinfer.cache.attention import metal, select, trial
from mlxinfer.cache.attention.metal import METAL
from mlxinfer.engine import compiled_step
from mlxinfer.engine.compiled_step import CompiledSteps
from mlxinfer.engine.engine import Engine
from mlxinfer.engine.model_runner import COMPILED_STEPS
from mlxinfer.kernels_metal.paged_attention import tiles

RANDOM = np.random.default_rng(3)
PROMPTS = [RANDOM.integers(3, 96, n).tolist() for n in (70, 9, 130, 33)]
FAMILIES = ("llama", "gemma3_text", "qwen3_moe", "qwen3_next", "falcon_h1", "phi3_longrope", "gpt_oss", "deepseek_v3", "lfm2")


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The choices of a Mac, with a kernel that MLX can trace here as it traces Metal's there."""
    monkeypatch.setenv(COMPILED_STEPS, "1")
    monkeypatch.delenv(select.SWITCH, raising=False)
    monkeypatch.setattr(select.kernels_cpu, "in_use", lambda: False)
    monkeypatch.setattr(select, "has_gpu_kernels", lambda: True)
    monkeypatch.setattr(select, "why_unsupported", lambda *_: None)
    monkeypatch.setattr(tiles, "DIMS", range(8, 513, 8))  # heads of tiny models
    monkeypatch.setattr(metal, "append_launch", TraceableAppend)
    monkeypatch.setattr(compiled_step, "kernels_in_use", lambda: True)
    monkeypatch.setattr(compiled_step.executors, "traceable", lambda: True)
    yield
    trial.forget()


def engine(name: str = "llama", **settings: object) -> Engine:
    made = tiny_engine(name, prefix_cache=False, max_context=640, max_draft=0, **settings)
    assert all(backend is METAL for _, backend in made.cache.attention)
    return made


def answered(made: Engine, limit: int = 90, **params: object) -> list[list[int]]:
    return run(made, [request(prompt, limit - 7 * i, seed=i, **params) for i, prompt in enumerate(PROMPTS)])


def steps(made: Engine) -> CompiledSteps:
    assert made.runner.compiled is not None
    return made.runner.compiled


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("name", [name if name == "lfm2" else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES])
def test_the_tokens_are_those_of_steps_that_are_built(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four sequences of different lengths fill pages and end one after another; some of them sample."""
    with monkeypatch.context() as patch:
        patch.setenv(COMPILED_STEPS, "0")
        plain = engine(name)
        assert plain.runner.compiled is None
        expected = [answered(plain), answered(plain, 40, temperature=0.9)]
    made = engine(name)
    assert [answered(made), answered(made, 40, temperature=0.9)] == expected
    assert steps(made).replayed > 90, (steps(made).replayed, steps(made).traced)
    assert steps(made).traced <= 12
