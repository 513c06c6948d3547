"""Replayed steps over long times: few traces, no more of them as contexts grow, and pools that stay in place."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines.replayed import built, choices_of_a_gpu, engine, steps
from support.engines.tiny_engine import request, run
from support.oracles import traceable_attention

from mlxinfer.engine.core.engine import Engine
from mlxinfer.engine.core.events import Token
from mlxinfer.engine.core.sequence import Sequence
from mlxinfer.engine.runner import compiled_step

RANDOM = np.random.default_rng(3)
PROMPTS = [RANDOM.integers(3, 96, n).tolist() for n in (70, 9, 130, 33, 64, 1)]
PROMPTS += [[*PROMPTS[2], 7, 8], PROMPTS[0][:64]]


@pytest.fixture(autouse=True, scope="module")
def on_a_gpu() -> Iterator[None]:
    with choices_of_a_gpu():
        yield


@pytest.mark.slow
def test_two_thousand_steps_are_traced_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages fill, pools grow, and a sequence is divided into more and more parts."""
    monkeypatch.setattr(traceable_attention, "MOST_PAGES", 34)
    made = engine(max_context=2100)
    sequence = request(PROMPTS[1], 2010)
    run(made, [sequence])
    assert len(sequence.answer) == 2010
    assert steps(made).replayed > 1900
    assert steps(made).traced <= 24, steps(made).traced


def test_a_trace_is_not_made_again() -> None:
    """Traces of the first answers serve all later ones."""
    made = engine()
    run(made, [request(prompt, 30) for prompt in PROMPTS[:4]])
    before = steps(made).traced
    run(made, [request(prompt, 30) for prompt in PROMPTS[:4]])
    first = steps(made).traced
    run(made, [request(prompt, 30) for prompt in PROMPTS[:4]])
    assert steps(made).traced == first <= 2 * before


@pytest.mark.long
def test_traces_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were not used for longest go, with what MLX keeps of them."""
    monkeypatch.setattr(compiled_step, "_MOST_TRACES", 2)
    expected = run(built(), [request(prompt, 50 - 9 * i) for i, prompt in enumerate(PROMPTS[:4])])
    made = engine()
    for _ in range(2):
        assert run(made, [request(prompt, 50 - 9 * i) for i, prompt in enumerate(PROMPTS[:4])]) == expected
    assert len(steps(made)._traces) == 2
    assert steps(made).traced > 4


@pytest.mark.long
def test_pools_stay_where_they_are() -> None:
    """A step changes no pool, and a page that it fills is written in place afterwards: no trace refers to the pools."""
    made = engine()
    made.add(request(PROMPTS[1], 200))
    for _ in range(20):
        made.step()
    for store, _ in made.cache.attention:  # large enough that a copy would show
        store.grow(pages=6000)
    pools = [a for store, _ in made.cache.attention for a in store.sealed]
    mx.eval(pools)
    size, places = sum(a.nbytes for a in pools), [_address(a) for a in pools]
    del pools
    for _ in range(20):  # the first ones are built, and traced
        made.step()
    gc.collect()
    before, replayed = mx.get_active_memory(), steps(made).replayed
    mx.reset_peak_memory()
    for _ in range(100):
        made.step()
    assert steps(made).replayed - replayed >= 96
    assert mx.get_peak_memory() - before < size / 20
    assert [_address(a) for store, _ in made.cache.attention for a in store.sealed] == places


def _address(array: mx.array) -> int:
    return int(np.asarray(memoryview(array)).__array_interface__["data"][0])


@dataclass(frozen=True)
class Arrival:
    """A request of a history."""

    prompt: int
    """Index in `PROMPTS`."""
    limit: int
    """Tokens of its answer."""
    after: int
    """Steps after the request before it."""
    temperature: float
    """0: greedy."""
    cancelled: int | None
    """Steps after which it is cancelled."""


ARRIVALS = st.builds(
    Arrival,
    st.integers(0, len(PROMPTS) - 1),
    st.integers(1, 40),
    st.integers(0, 12),
    st.sampled_from([0.0, 0.9]),
    st.none() | st.integers(0, 30),
)


def played(made: Engine, history: list[Arrival]) -> list[list[tuple[int, float]]]:
    """Tokens with log-probabilities of each request."""
    coming: list[tuple[int, Arrival]] = []
    for arrival in history:
        coming.append(((coming[-1][0] if coming else 0) + arrival.after, arrival))
    found: dict[Sequence, list[tuple[int, float]]] = {}
    leaving: list[tuple[int, Sequence]] = []
    number = 0
    while coming or not made.idle:
        while coming and coming[0][0] <= number:
            arrival = coming.pop(0)[1]
            sequence = request(PROMPTS[arrival.prompt], arrival.limit, seed=len(found), temperature=arrival.temperature, logprobs=1)
            found[sequence] = []
            made.add(sequence)
            if arrival.cancelled is not None:
                leaving.append((number + arrival.cancelled, sequence))
        for when, sequence in leaving:
            if when == number:
                made.abort(sequence)
        for event in made.step():
            if isinstance(event, Token):
                found[event.sequence].append((event.token_id, float(event.logprob or 0.0)))
        number += 1
    return list(found.values())


def check(name: str, histories: list[list[Arrival]]) -> None:
    replaying, building = engine(name, prefix_cache=True), built(name, prefix_cache=True)
    for history in histories:
        assert played(replaying, history) == played(building, history)


HISTORIES = st.lists(st.lists(ARRIVALS, min_size=1, max_size=6), min_size=1, max_size=3)
"""One after another on the same engine."""


@pytest.mark.long
@settings(max_examples=3)
@given(histories=HISTORIES)
def test_any_history_of_requests(histories: list[list[Arrival]]) -> None:
    """Requests that come, end, are cancelled and share prefixes: answers are those of steps that are built."""
    check("llama", histories)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text", "gpt_oss"])
@settings(max_examples=40)
@given(histories=HISTORIES)
def test_many_histories_of_requests(name: str, histories: list[list[Arrival]]) -> None:
    check(name, histories)
