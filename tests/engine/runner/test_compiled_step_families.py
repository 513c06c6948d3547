"""Decode steps of every family, replayed compared to built: equal tokens, and log-probabilities equal to the bit."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from support.engines.replayed import built, choices_of_a_gpu, engine, steps
from support.engines.tiny_engine import GOLDEN, request

from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.engine.core.engine import Engine
from mlxinfer.engine.core.events import Token
from mlxinfer.engine.core.sequence import Sequence

RANDOM = np.random.default_rng(3)
PROMPTS = [RANDOM.integers(3, 90, n).tolist() for n in (70, 9, 125, 33, 50, 3, 17, 44)]
NAMES = sorted(folder.name for folder in GOLDEN.iterdir() if (folder / "config.json").exists())
SAMPLE = {"gemma4_text_shared", "llama", "qwen3_5_text"}


@pytest.fixture(autouse=True, scope="module")
def on_a_gpu() -> Iterator[None]:
    with choices_of_a_gpu():
        yield


def answers(made: Engine, groups: list[list[Sequence]]) -> list[list[tuple[int, float]]]:
    """Tokens with their log-probabilities. A group of requests comes eleven steps after the one before, and each ends at its own length."""
    found: dict[Sequence, list[tuple[int, float]]] = {s: [] for group in groups for s in group}
    waiting, number = list(groups), 0
    while waiting or not made.idle:
        if waiting and (made.idle or number % 11 == 0):
            for sequence in waiting.pop(0):
                made.add(sequence)
        for event in made.step():
            assert isinstance(event, Token)
            found[event.sequence].append((event.token_id, float(event.logprob or 0.0)))
        number += 1
    return list(found.values())


def requests() -> list[list[Sequence]]:
    """One row, then two, four and eight; greedy and sampled."""
    made = [
        request(prompt, (60, 57, 42, 45, 28, 31, 34, 25)[i], seed=i, temperature=0.8 * (i % 2), logprobs=2)
        for i, prompt in enumerate(PROMPTS)
    ]
    return [made[:1], made[1:2], made[2:4], made[4:]]


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long if name in SAMPLE else pytest.mark.slow) for name in NAMES])
def test_every_family_at_one_to_eight_rows(name: str) -> None:
    expected = answers(built(name), requests())
    made = engine(name)
    assert answers(made, requests()) == expected
    assert steps(made).replayed > 15, (steps(made).replayed, steps(made).traced)
    assert {1, 2, 4, 8} <= rows_replayed(made)


def rows_replayed(made: Engine) -> set[int]:
    return {key[0][0] for key in steps(made)._traces}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param("llama", "first16", marks=pytest.mark.long),
        *(pytest.param("llama", form, marks=pytest.mark.slow) for form in ("8", "4", "k8v4")),
        *(pytest.param(name, form, marks=pytest.mark.slow) for name in ("qwen3_5_text", "gemma3_text") for form in ("8", "4", "first16")),
    ],
)
def test_quantized_caches(name: str, form: str) -> None:
    kv = KVFormat(4, 4, first16=True) if form == "first16" else KVFormat.parse(form)
    expected = answers(built(name, kv=kv), requests())
    made = engine(name, kv=kv)
    assert answers(made, requests()) == expected
    assert steps(made).replayed > 15


def test_traces_are_real() -> None:
    """Otherwise nothing here would show what a trace captures."""
    mx.eval(mx.array(1) + 1)  # the first operation of a process makes its stream, and MLX traces anew for another stream
    calls = []

    def function(x: mx.array) -> mx.array:
        calls.append(x)
        return x + len(calls)

    compiled = mx.compile(function)
    found = [compiled(mx.array(1)).item() for _ in range(4)]
    assert found[1] == found[2] == found[3], "the first call of a process may be traced twice"
