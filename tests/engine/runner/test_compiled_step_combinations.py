"""Replayed steps combined with other features of requests and engines, and with failures."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.engines.drafting import Free
from support.engines.replayed import built, by_traces, choices_of_a_gpu, engine, steps
from support.engines.tiny_engine import GOLDEN, request, run, tiny_model
from support.models.adapters import random_changes, write_peft

from mlxinfer.adapters.adapted_model import AdaptedModel
from mlxinfer.adapters.files import open_adapter
from mlxinfer.cache.attention.metal import MetalAttention
from mlxinfer.engine.core.engine import Engine
from mlxinfer.engine.core.schedule import Schedule
from mlxinfer.engine.core.sequence import Sequence
from mlxinfer.kernels_metal import kernel_trial
from mlxinfer.models.hooks import RESIDUAL

RANDOM = np.random.default_rng(3)
PROMPTS = [RANDOM.integers(3, 96, n).tolist() for n in (20, 9, 33)]


@pytest.fixture(autouse=True, params=[None, 3], ids=["trusted", "checked"])
def on_a_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    with choices_of_a_gpu(checked=request.param):
        yield


def asked(limit: int = 16, **params: object) -> list[Sequence]:
    return [request(prompt, limit, seed=i, **params) for i, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_a_step_that_cannot_be_traced_is_built(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails at the end of a real trace; nothing of that is left, no kernel is given up, and it is not tried again."""
    expected, made, failed = run(built(name), asked(8)), engine(name), []
    plain = type(made.model).scores

    def scores(self: object, hidden: mx.array) -> mx.array:
        if any(frame.function == "compute" for frame in inspect.stack()):
            failed.append(1)
            raise RuntimeError("no trace")
        return plain(self, hidden)  # type: ignore[arg-type]

    monkeypatch.setattr(type(made.model), "scores", scores)
    runner = made.runner
    assert run(made, asked(8)) == expected
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
    assert by_traces(made) > 3


def test_preemptions_between() -> None:
    expected, made, calls = run(built(), asked(20)), engine(), []
    scheduler, schedule = made.scheduler, made.scheduler.schedule

    def sometimes_preempting() -> Schedule:
        calls.append(0)
        return Schedule(preempt=[scheduler.running[-1]]) if len(calls) in (6, 10) and scheduler.running else schedule()

    scheduler.schedule = sometimes_preempting  # type: ignore[method-assign]
    assert run(made, asked(20)) == expected
    assert made.stats().preemptions == 2
    assert by_traces(made) > 3


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
    assert by_traces(made) > 3


def test_a_failed_step_on_the_way(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Replays are given up first: the engine begins anew without them, and with its kernels."""
    monkeypatch.setattr(kernel_trial, "TRIALS", [])  # no kernel fails its trial now
    expected, made = run(built(), asked()), engine()
    runner, submit, calls = made.runner, made.runner.submit, []

    def failing(*arguments: object) -> object:
        calls.append(0)
        if len(calls) == 16:
            raise RuntimeError("[metal::Device] Unable to load kernel")
        return submit(*arguments)  # type: ignore[arg-type]

    made.runner.submit = failing  # type: ignore[method-assign,assignment]
    assert run(made, asked()) == expected
    assert runner.replays
    assert made.runner is not runner
    assert made.runner.compiled is None
    assert all(isinstance(backend, MetalAttention) for _, backend in made.cache.attention)
    assert "all steps are built" in caplog.text


def test_a_step_that_fails_before_any_was_replayed() -> None:
    """The engine begins anew, and with it the traces: nothing of the old cache is in them."""
    expected, made = run(built(), asked()), engine()
    runner, calls = made.runner, []
    submit = runner.submit

    def failing(*arguments: object) -> object:
        calls.append(0)
        if len(calls) == 2:
            raise RuntimeError("[metal::Device] Unable to load kernel")
        return submit(*arguments)  # type: ignore[arg-type]

    made.runner.submit = failing  # type: ignore[method-assign,assignment]
    assert run(made, asked()) == expected
    assert made.runner is not runner


def test_deterministic_answers_are_of_one_kind() -> None:
    """Alone, a sequence's steps could be replayed, and in company they could not: all are built."""
    assert engine(deterministic=True).runner.compiled is None


class _OddTokens:
    """A `Constraint`: only odd tokens may follow."""

    fault = ""

    def advance(self, token: int) -> str:
        return "" if token % 2 else "even"

    def rows(self, drafts: list[int]) -> np.ndarray:
        return np.full((1 + len(drafts), 3), 0xAAAAAAAA, np.uint32).view(np.int32)

    def allowed(self, drafts: list[int]) -> int:
        return next((i for i, token in enumerate(drafts) if not token % 2), len(drafts))

    def forced(self) -> list[int]:
        return []

    def expected(self) -> tuple[list[int], list[float]]:
        return [], []

    def copy(self) -> _OddTokens:
        return self


class _Steering:
    """`Hooks` that change what enters the second block."""

    def wants(self, place: str, layer: int) -> bool:
        return place == RESIDUAL and layer == 1

    def at(self, place: str, layer: int, x: mx.array, segments: object) -> mx.array:
        return x * 1.5

    def attended(self, *arguments: object) -> None: ...

    def arrays(self) -> list[mx.array]:
        return []


def test_constraints_hooks_and_drafts() -> None:
    """Answers held to a structure are sampled after the step; steps with hooks or drafts are built, the others replayed."""
    pattern = [7, 9, 11, 13] * 12

    def answers(made: Engine) -> list[list[int]]:
        held, hooked, plain = asked(24)
        held.constraint = _OddTokens()
        hooked.hooks, hooked.max_length = _Steering(), len(hooked.prompt) + 8
        repeated = request(pattern, 20)
        found = run(made, [held, hooked, plain, repeated])
        assert all(token % 2 for token in found[0])
        assert repeated.drafted_tokens
        return found

    made = eager(engine(max_draft=4))
    assert answers(made) == answers(eager(built(max_draft=4)))
    assert by_traces(made) > 3


def eager(made: Engine) -> Engine:
    """One that drafts wherever it can."""
    made.proposer.times, made.proposer.account.share = Free(), 1e9
    return made
