"""A sequence that goes on from what others have left computes what it computes alone: to the last bit with the CPU kernels."""

import mlx.core as mx
import numpy as np
import pytest
from support.tiny import random_tokens
from support.tiny_engine import tiny_model

from mlxinfer import kernels_cpu
from mlxinfer.cache.base import Segment
from mlxinfer.cache.format import KVFormat
from mlxinfer.cache.paged import PagedCache
from mlxinfer.cache.pool import Match

TOKENS, OTHERS = random_tokens(600), random_tokens(900)[600:]
FULL, SLIDING, SINKS, SOFTCAP, EXPERTS, HYBRID, GATED = "llama", "gemma3_text", "gpt_oss", "gemma2", "mixtral", "qwen3_next", "qwen3_5_text"
WINDOWS = (SLIDING, SINKS, SOFTCAP)
STATES = (HYBRID, GATED)
KINDS = [
    (FULL, KVFormat()),
    (FULL, KVFormat(4, 4, first16=True)),
    (SLIDING, KVFormat()),
    (SLIDING, KVFormat(4, 4)),
    (SINKS, KVFormat(8, 4)),
    (SINKS, KVFormat(4, 4, first16=True)),
    (SOFTCAP, KVFormat(8, 4, first16=True)),
    (EXPERTS, KVFormat()),
    (EXPERTS, KVFormat(8, 4)),
    (HYBRID, KVFormat()),
    (HYBRID, KVFormat(4, 4, first16=True)),
    (GATED, KVFormat(8, 4)),
]
IDS = [f"{name}-{kv.name}{'-first16' * kv.first16}" for name, kv in KINDS]
every_kind = pytest.mark.parametrize(("name", "kv"), KINDS, ids=IDS)


class Reader:
    """A model with a cache of one format, and the tokens that each slot has computed."""

    def __init__(self, name: str, kv: KVFormat, *, capacity: int = 1 << 14, reuse: int = 1 << 14, chunk: int = 1000):
        self.model = tiny_model(name)
        self.cache = PagedCache(
            self.model.layers,
            dtype=mx.float32,
            capacity_tokens=capacity,
            chunk=chunk,
            kv=kv,
            reuse_tokens=reuse,
            snapshot_bytes=1 << 26 if reuse else 0,
        )
        self.done: dict[int, list[int]] = {}

    def start(self, tokens: list[int]) -> tuple[int, Match]:
        """A slot for these tokens, with what is known of them."""
        match = self.cache.find(tokens)
        slot = self.cache.open(match)
        self.done[slot] = tokens[: match.reused]
        return slot, match

    def read(self, *parts: tuple[int, list[int]]) -> list[np.ndarray]:
        """Logits of the pieces of (slot, tokens) in one step."""
        segments, start = [], 0
        for slot, tokens in parts:
            segments.append(Segment(slot, start, len(tokens), len(self.done[slot]), 1000))
            self.done[slot] = self.done[slot] + tokens
            start += len(tokens)
        step = self.cache.begin(segments)
        logits = self.model.logits(self.model.hidden(mx.array([t for _, tokens in parts for t in tokens], mx.int32), step))
        mx.eval(logits, step.state)
        self.cache.commit(step, self.done)
        return [np.array(logits[s.start : s.start + s.count]) for s in segments]

    def keep(self, slot: int) -> None:
        self.cache.keep(slot, self.done[slot])

    def leave(self, tokens: list[int], *stops: int) -> None:
        """Compute tokens in pieces that end at `stops` and at the end, keep what there is there, and go."""
        slot, match = self.start(tokens)
        for stop in sorted({*stops, len(tokens)}):
            if stop > match.reused:
                self.read((slot, tokens[len(self.done[slot]) : stop]))
                self.keep(slot)
        self.cache.release(slot)

    def resume(self, tokens: list[int]) -> tuple[Match, np.ndarray]:
        """Logits of what was not known."""
        slot, match = self.start(tokens)
        rows = self.read((slot, tokens[match.reused :]))[0]
        self.cache.release(slot)
        return match, rows


def fresh(name: str, kv: KVFormat, tokens: list[int]) -> np.ndarray:
    reader = Reader(name, kv, reuse=0)
    return reader.resume(tokens)[1]


def check(name: str, kv: KVFormat, tokens: list[int], found: tuple[Match, np.ndarray], reused: int) -> None:
    match, rows = found
    assert match.reused == reused, match.note
    want = fresh(name, kv, tokens)[reused:]
    if kernels_cpu.in_use():
        np.testing.assert_array_equal(rows, want)
    else:
        np.testing.assert_allclose(rows, want, atol=2e-5)


@every_kind
def test_going_on_at_any_kind_of_position(name, kv):
    reader = Reader(name, kv)
    reader.leave(TOKENS[:300], 30, 128, 200)
    check(name, kv, TOKENS, reader.resume(TOKENS), 300)
    exact = name in STATES
    places = [(200, 200), (210, 200), (150, 128), (128, 128), (30, 30), (100, 30 if exact else 64), (290, 200 if exact else 290)]
    for shared, reused in [*places, (20, 0 if exact else 20)]:
        tokens = TOKENS[:shared] + OTHERS[:100]
        check(name, kv, tokens, reader.resume(tokens), reused)
