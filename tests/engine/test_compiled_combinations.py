"""Steps that MLX replays, together with what else requests and engines can have, and with what goes wrong."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.adapters import random_changes, write_peft
from support.tiny_engine import GOLDEN, request, run, tiny_engine, tiny_model
from support.traceable_attention import TraceableAppend

from mlxinfer.adapters.adapted import AdaptedModel
from mlxinfer.adapters.files import open_adapter
from mlxinfer.cache.attention import metal, select, trial
from mlxinfer.engine import compiled_step
from mlxinfer.engine.compiled_step import CompiledSteps
from mlxinfer.engine.engine import Engine
from mlxinfer.engine.model_runner import COMPILED_STEPS
from mlxinfer.engine.scheduler import Schedule
from mlxinfer.engine.sequence import Sequence
from mlxinfer.kernels_metal.paged_attention import tiles

RANDOM = np.random.default_rng(3)
PROMPTS = [RANDOM.integers(3, 96, n).tolist() for n in (20, 9, 33)]


@pytest.fixture(autouse=True)
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
    return tiny_engine(name, **{"prefix_cache": False, "max_context": 640, "max_draft": 0, **settings})


def asked(limit: int = 16, **params: object) -> list[Sequence]:
    return [request(prompt, limit, seed=i, **params) for i, prompt in enumerate(PROMPTS)]


def steps(made: Engine) -> CompiledSteps:
    assert made.runner.compiled is not None
    return made.runner.compiled


def built(name: str = "llama") -> Engine:
    """An engine that builds every step."""
    made = engine(name)
    made.runner.compiled = None
    return made


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_a_step_that_cannot_be_traced_is_built(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails at the end of a real trace; nothing of that is left, no kernel is given up, and it is not tried again."""
    expected, made, failed = run(built(name), asked(8)), engine(name), []
    plain = type(made.model).logits

    def logits(self: object, hidden: mx.array) -> mx.array:
        if any(frame.function == "compute" for frame in inspect.stack()):
            failed.append(1)
            raise RuntimeError("no trace")
        return plain(self, hidden)  # type: ignore[arg-type]

    monkeypatch.setattr(type(made.model), "logits", logits)
    mx.enable_compile()
    try:
        runner = made.runner
        assert run(made, asked(8)) == expected
    finally:
        mx.disable_compile()
    assert len(failed) == 1
    assert made.runner is runner
    assert not steps(made).replayed


def test_several_samples_penalties_and_log_probabilities() -> None:
    def answers(made: Engine) -> list[list[int]]:
        samples = [request(PROMPTS[0], 14, index=i, temperature=1.0, seed=6) for i in range(3)]
        samples[0].lead(samples[1:])
        penalized = request(PROMPTS[1], 14, frequency_penalty=0.9, repetition_penalty=1.3, logprobs=2)
        run(made, [samples[0], penalized])
        return [s.answer for s in (*samples, penalized)]

    made = engine()
    assert answers(made) == answers(built())
    assert steps(made).replayed > 3


def test_preemptions_between() -> None:
    expected, made, calls = run(built(), asked(20)), engine(), []
    scheduler, schedule = made.scheduler, made.scheduler.schedule

    def sometimes_preempting() -> Schedule:
        calls.append(0)
        return Schedule(preempt=[scheduler.running[-1]]) if len(calls) in (6, 10) and scheduler.running else schedule()

    scheduler.schedule = sometimes_preempting  # type: ignore[method-assign]
    assert run(made, asked(20)) == expected
    assert made.stats().preemptions == 2
    assert steps(made).replayed > 3


def test_adapters_come_and_go(tmp_path: Path) -> None:
    """Steps with one are built, those without are replayed, in turns over one cache."""
    model = tiny_model("llama")
    shapes = {name: tuple(a.shape) for name, a in mx.load(str(GOLDEN / "llama" / "model.safetensors")).items()}
    folder = write_peft(tmp_path / "a", random_changes({k: v for k, v in shapes.items() if len(v) == 2}))
    adapted = AdaptedModel(model, [open_adapter("a", folder, {})], mx.float32)

    def answers(made: Engine) -> list[list[int]]:
        sequences = asked(20)
        sequences[1].adapter, sequences[1].max_length = adapted.adapters["a"], len(PROMPTS[1]) + 6
        return run(made, sequences)

    def with_adapters(made: Engine) -> Engine:
        made.adapt(adapted)
        return made

    made = with_adapters(engine())
    assert answers(made) == answers(with_adapters(built()))
    assert steps(made).replayed > 3


def test_a_failed_step_on_the_way() -> None:
    """The engine begins anew, and with it the traces: nothing of the old cache is in them."""
    expected, made = run(built(), asked()), engine()
    runner, submit, calls = made.runner, made.runner.submit, []

    def failing(*arguments: object) -> object:
        calls.append(0)
        if len(calls) == 10:
            raise RuntimeError("[metal::Device] Unable to load kernel")
        return submit(*arguments)  # type: ignore[arg-type]

    made.runner.submit = failing  # type: ignore[method-assign,assignment]
    assert run(made, asked()) == expected
    assert made.runner is not runner
    assert steps(made).replayed > 3


def test_deterministic_answers_are_of_one_kind() -> None:
    """Alone, a sequence's steps could be replayed, and in company they could not: all are built."""
    assert engine(deterministic=True).runner.compiled is None
