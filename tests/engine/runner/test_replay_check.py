"""Comparison of replayed steps with built ones: equal ones are trusted, and a wrong one changes no answer."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.engines.replayed import built, by_traces, choices_of_a_gpu, engine, steps
from support.engines.tiny_engine import request, run, tiny_model

from mlxinfer.config import EngineConfig
from mlxinfer.engine.core.engine import Engine
from mlxinfer.engine.core.sequence import Sequence
from mlxinfer.engine.runner import compiled_step, replay_check
from mlxinfer.engine.runner.model_runner import COMPILED_STEPS
from mlxinfer.engine.runner.replay_check import STEPS, TRACE_STEPS, ReplayCheck, compare, forget, remembered, replay_lines

RANDOM = np.random.default_rng(3)
PROMPTS = [RANDOM.integers(3, 96, n).tolist() for n in (20, 9, 33)]


@pytest.fixture(autouse=True)
def on_a_gpu() -> Iterator[None]:
    with choices_of_a_gpu(checked=STEPS):
        yield


def asked(limit: int) -> list[Sequence]:
    return [request(prompt, limit, seed=i, temperature=0.8 * (i % 2)) for i, prompt in enumerate(PROMPTS)]


def checked_engine(check: ReplayCheck, name: str = "llama") -> Engine:
    settings = EngineConfig(max_context=640, kv_cache_tokens=4096, max_num_batched_tokens=256, max_draft=0, prefix_cache=False)
    return Engine(tiny_model(name), settings, dtype=mx.float32, check=check)


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_steps_are_replayed_after_64_equal_ones(name: str) -> None:
    expected, made = run(built(name), asked(150)), engine(name)
    assert run(made, asked(150)) == expected
    assert steps(made).checked >= STEPS
    assert steps(made).replayed > 20


def test_no_step_is_replayed_before() -> None:
    made = engine()
    made.add(request(PROMPTS[0], 200))
    while steps(made).checked < STEPS:
        made.step()
        assert not steps(made).replayed
    assert steps(made)._unread, "nobody waits for the last comparison"
    for _ in range(4):
        made.step()
    assert steps(made).replayed


def test_a_new_trace_is_compared_twice_again() -> None:
    made = engine()
    run(made, asked(150))
    before, traces = steps(made).checked, steps(made).traced
    run(made, [request(PROMPTS[0], 30, seed=i) for i in range(6)])  # more rows than before
    assert steps(made).traced > traces
    assert TRACE_STEPS <= steps(made).checked - before <= (TRACE_STEPS + 1) * (steps(made).traced - traces)


def spoiled(monkeypatch: pytest.MonkeyPatch, how: object, call: int) -> list[int]:
    """From this call on, traces return other scores."""
    plain, calls = compiled_step._compute, list[int]()

    def compute(*arguments: object) -> object:
        made = plain(*arguments)  # type: ignore[arg-type]

        def wrong(*inputs: object) -> list[mx.array]:
            scores, *left = made(*inputs)  # type: ignore[arg-type]
            calls.append(0)
            return [how(scores) if len(calls) >= call else scores, *left]  # type: ignore[operator]

        return wrong

    monkeypatch.setattr(compiled_step, "_compute", compute)
    return calls


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (lambda scores: mx.roll(scores, 1, -1), "another token"),
        (lambda scores: scores * 1.1, "scores that differ"),
        (lambda scores: scores * mx.nan, "gave"),
        (lambda scores: mx.where(mx.arange(scores.shape[-1]) == 5, mx.inf, scores), "another token"),
    ],
)
def test_a_wrong_trace_changes_no_answer(how: object, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Its scores are used nowhere. One note names the model, and no other model of the process is replayed either."""
    expected, other = run(built(), asked(60)), run(built("qwen3"), asked(20))
    calls = spoiled(monkeypatch, how, 9)
    made = checked_engine(ReplayCheck("Tiny 1B", mx.float32))
    with caplog.at_level(logging.WARNING):
        assert run(made, asked(60)) == expected
    assert 9 <= len(calls) <= 11, "until the comparison is read"
    assert not steps(made).replayed
    (note,) = [record.message for record in caplog.records if "replayed" in record.message]
    assert "Tiny 1B" in note
    assert said in note
    assert not steps(made)._traces, "nothing is kept of traces"
    second = engine("qwen3")
    assert run(second, asked(20)) == other
    assert not by_traces(second)
    forget()
    third = engine("qwen3")
    run(third, asked(20))
    assert by_traces(third)


def test_a_trace_that_keeps_a_position_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if positions were constants: every step of a trace turns by the cosines of its first."""
    kept: dict[tuple[int, ...], list[mx.array]] = {}
    plain = compiled_step._compute

    def compute(model: object, traced: object) -> object:
        made = plain(model, traced)  # type: ignore[arg-type]

        def wrong(tokens: mx.array, given: list[mx.array], *rest: object) -> list[mx.array]:
            waves = kept.setdefault(tuple(tokens.shape), given[-1:])
            return made(tokens, [*given[:-1], *waves], *rest)  # type: ignore[arg-type]

        return wrong

    monkeypatch.setattr(compiled_step, "_compute", compute)
    expected, made = run(built(), asked(60)), engine()
    assert run(made, asked(60)) == expected
    assert replay_check._faults
    assert not steps(made).replayed


def test_without_comparison_and_without_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMPILED_STEPS, "1")
    trusted = engine()
    run(trusted, asked(20))
    assert steps(trusted).replayed
    assert not steps(trusted).checked
    monkeypatch.setenv(COMPILED_STEPS, "0")
    assert engine().runner.compiled is None


def test_two_models_in_turns_are_compared_apart() -> None:
    names = ("llama", "qwen3")
    expected = [run(built(name), asked(110)) for name in names]
    engines = [engine(name) for name in names]
    sequences = [asked(110) for _ in names]
    for made, wanted in zip(engines, sequences, strict=True):
        for sequence in wanted:
            made.add(sequence)
    while not all(made.idle for made in engines):
        for made in engines:
            made.step()
    assert [[s.answer for s in wanted] for wanted in sequences] == expected
    assert all(steps(made).checked >= STEPS and steps(made).replayed for made in engines)


def test_other_kernels_are_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after 64 equal steps: what passed were other traces."""
    age = [0]
    for module in (replay_check, compiled_step):
        monkeypatch.setattr(module, "age", lambda: age[0])
    made, expected = engine(), run(built(), [request(PROMPTS[0], 300)])
    sequence = request(PROMPTS[0], 300)
    made.add(sequence)
    while steps(made).replayed < 5:
        made.step()
    checked, age[0] = steps(made).checked, 1
    while not made.idle:
        made.step()
    assert [sequence.answer] == expected
    assert steps(made).checked >= checked + STEPS


def test_results_are_kept_by_machine_and_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_check, "age", lambda: 0)  # no other test gave up a kernel
    file = tmp_path / "new" / "replays.json"
    made = checked_engine(ReplayCheck("Tiny 1B", mx.float32, file, "a"))
    run(made, asked(150))
    assert remembered(file) == {"a": {"name": "Tiny 1B"}}
    again = checked_engine(ReplayCheck("Tiny 1B", mx.float32, file, "a"))
    run(again, asked(40))
    assert 0 < steps(again).checked <= (TRACE_STEPS + 1) * steps(again).traced, "only each trace is compared"
    assert steps(again).replayed
    ReplayCheck("Broken 2B", mx.float32, file, "b").fail("scores that differ by 2 of the largest")
    forget()
    assert ReplayCheck("Tiny 1B", mx.float32, file, "a").allowed
    assert not ReplayCheck("Broken 2B", mx.float32, file, "b").allowed
    assert not ReplayCheck("Tiny 1B", mx.float32, file, "c").trusts(TRACE_STEPS)
    right, wrong = replay_lines(file)
    assert "Tiny 1B" in right
    assert "Broken 2B (scores that differ by 2 of the largest)" in wrong
    monkeypatch.setattr(replay_check, "machine", lambda: "another")
    assert remembered(file) == {}
    assert replay_lines(file) == []


@pytest.mark.parametrize("content", ["", "[]", '{"machine": 1}', '{"machine": "HERE", "models": {"a": {"name": 3}, "b": 4}}', "\xff"])
def test_files_that_were_written_by_others(content: str, tmp_path: Path) -> None:
    file = tmp_path / "replays.json"
    file.write_text(content.replace("HERE", json.dumps(replay_check.machine())[1:-1]), encoding="latin-1")
    assert remembered(file) == {}
    assert ReplayCheck("Tiny 1B", mx.float32, file, "a").allowed


def test_a_folder_that_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check = ReplayCheck("Tiny 1B", mx.float32, tmp_path / "file" / "replays.json", "a")
    check.fail("something")
    assert not check.allowed


def test_nothing_is_kept_after_a_kernel_was_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_check, "age", lambda: 1)
    check = ReplayCheck("Tiny 1B", mx.float32, tmp_path / "replays.json", "a")
    for _ in range(STEPS):
        assert check.learn(mx.array([1.0, 0.0, 0.0]))
    assert check.trusts(TRACE_STEPS)
    assert remembered(tmp_path / "replays.json") == {}


ROW = [4.0, 3.99, -8.0, 1.0]


@pytest.mark.parametrize(
    ("replayed", "dtype", "equal"),
    [
        (ROW, mx.float32, True),
        ([4.0, 3.99, -8.0, 1.0001], mx.float32, True),
        ([3.99, 4.0, -8.0, 1.0], mx.bfloat16, True),  # a tie
        ([3.99, 4.0, -8.0, 1.0], mx.float32, False),  # no tie
        ([4.0, 3.99, -8.3, 1.0], mx.bfloat16, True),
        ([4.0, 3.99, -8.6, 1.0], mx.bfloat16, False),
        ([4.0, 3.99, -8.3, 1.0], mx.float16, False),
        ([4.0, 3.99, mx.nan, 1.0], mx.bfloat16, False),
        ([4.0, 3.99, -mx.inf, 1.0], mx.bfloat16, False),
    ],
)
def test_rounding_is_allowed(replayed: list[float], dtype: mx.Dtype, equal: bool) -> None:
    result = compare(mx.array([ROW, ROW]), mx.array([ROW, replayed]))
    check = ReplayCheck(dtype=dtype)
    assert check.learn(result) is equal
    assert check.allowed is equal


def test_rows_without_numbers_say_nothing() -> None:
    """A model that answers NaN does so in both ways; it proves and refutes nothing. Tokens that are never chosen have -inf."""
    nothing = mx.full((1, 4), mx.nan)
    check = ReplayCheck()
    assert not check.learn(compare(nothing, nothing))
    assert check.allowed
    masked = mx.array([[1.0, -mx.inf, 2.0, -mx.inf]])
    assert check.learn(compare(masked, masked))
