"""The gain of a router that sends each conversation to the engine with its prefix: two engines with room for half."""

from __future__ import annotations

import numpy as np
from support.engines.tiny_engine import request, run, tiny_engine

from mlxinfer.engine.core.engine import Engine

CONVERSATIONS, TURNS, BEGINNING, QUESTION = 8, 4, 192, 24
ROOM = 1024
"""Tokens that an engine keeps while nobody uses them: of 8 conversations with 260 tokens on average, 4."""


def engine() -> Engine:
    return tiny_engine(max_context=640, kv_cache_tokens=8192, prefix_cache_tokens=ROOM, snapshot_bytes=2**20)


def read_from_caches(*, by_turns: bool) -> tuple[int, int]:
    """Tokens of prompts that were found in a cache, and all of them: the same conversations in the same order each time."""
    rng, engines = np.random.default_rng(7), [engine(), engine()]
    talks = [rng.integers(3, 96, BEGINNING).tolist() for _ in range(CONVERSATIONS)]
    order = rng.permutation(np.repeat(np.arange(CONVERSATIONS), TURNS))
    found = total = 0
    for turn, number in enumerate(order.tolist()):
        talk = talks[number]
        talk += rng.integers(3, 96, QUESTION).tolist()
        sequence = request(list(talk), 4)
        (answer,) = run(engines[(turn if by_turns else number) % 2], [sequence])
        talk += answer
        found, total = found + sequence.reused_tokens, total + len(sequence.prompt)
    return found, total


def test_room_for_half_of_the_conversations() -> None:
    (kept, of_all), (turned, same) = read_from_caches(by_turns=False), read_from_caches(by_turns=True)
    assert of_all == same
    assert kept >= 1.5 * turned > 0
