"""A sequence that goes on from what others have left computes what it computes alone: to the last bit with the CPU kernels."""

from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from support.engines.tiny_engine import tiny_model
from support.models.tiny import random_tokens

from mlxinfer import kernels_cpu
from mlxinfer.cache.base import PAGE, Segment
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.cache.paged import PagedCache
from mlxinfer.cache.pool import Match, PoolUsage

TOKENS, OTHERS = random_tokens(600), random_tokens(900)[600:]
FULL, SLIDING, SINKS, SOFTCAP, EXPERTS, HYBRID, GATED = "llama", "gemma3_text", "gpt_oss", "gemma2", "mixtral", "qwen3_next", "qwen3_5_text"
WINDOWS = (SLIDING, SINKS, SOFTCAP)
STATES = (HYBRID, GATED)
KINDS = [
    (FULL, KVFormat()),
    (FULL, KVFormat(4, 4, first16=True)),
    (SLIDING, KVFormat(4, 4)),
    (SINKS, KVFormat(4, 4, first16=True)),
    (EXPERTS, KVFormat(8, 4)),
    (HYBRID, KVFormat(4, 4, first16=True)),
]
MORE = [
    (SLIDING, KVFormat()),
    (SINKS, KVFormat(8, 4)),
    (SOFTCAP, KVFormat(8, 4, first16=True)),
    (EXPERTS, KVFormat()),
    (HYBRID, KVFormat()),
    (GATED, KVFormat(8, 4)),
]
IDS = [f"{name}-{kv.name}{'-first16' * kv.first16}" for name, kv in KINDS + MORE]
# Each family and each format is among the first, or here one that is not `slow`.
ELSEWHERE = (SOFTCAP, GATED)
every_kind = pytest.mark.parametrize(
    ("name", "kv"),
    [*KINDS, *(pytest.param(*kind, marks=pytest.mark.long if kind[0] in ELSEWHERE else pytest.mark.slow) for kind in MORE)],
    ids=IDS,
)


class Reader:
    """A model with a cache of one format, and the tokens that each slot has computed."""

    def __init__(self, name: str, kv: KVFormat, *, capacity: int = 1 << 14, reuse: int = 1 << 14, chunk: int = 1000):
        self.model = tiny_model(name)
        self.cache = PagedCache(
            self.model.layers,
            dtype=mx.float32,
            kv_cache_tokens=capacity,
            chunk=chunk,
            kv=kv,
            prefix_cache_tokens=reuse,
            snapshot_bytes=1 << 26 if reuse else 0,
        )
        self.done: dict[int, list[int]] = {}

    def start(self, tokens: list[int]) -> tuple[int, Match]:
        """A slot for these tokens, with what is known of them."""
        match = self.cache.find(tokens)
        slot = self.cache.open(match)
        self.done[slot] = tokens[: match.reused]
        return slot, match

    def read(self, *parts: tuple[int, list[int]], drafts: dict[int, int] | None = None) -> list[np.ndarray]:
        """Logits of the pieces of (slot, tokens) in one step, of which the last ones may be drafts."""
        segments, start = [], 0
        for slot, tokens in parts:
            segments.append(Segment(slot, start, len(tokens), len(self.done[slot]), 1000, (drafts or {}).get(slot, 0)))
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
    return _fresh(name, kv, tuple(tokens))


@cache
def _fresh(name: str, kv: KVFormat, tokens: tuple[int, ...]) -> np.ndarray:
    return Reader(name, kv, reuse=0).resume(list(tokens))[1]


def check(name: str, kv: KVFormat, tokens: list[int], found: tuple[Match, np.ndarray], reused: int) -> None:
    match, rows = found
    assert match.reused == reused, match.note
    want = fresh(name, kv, tokens)[reused:]
    if kernels_cpu.in_use():
        np.testing.assert_array_equal(rows, want)
    else:
        np.testing.assert_allclose(rows, want, atol=2e-5)


@pytest.mark.long
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


@pytest.mark.long
@every_kind
def test_two_that_compute_the_same_at_once_share_it(name, kv):
    reader = Reader(name, kv)
    one, two = reader.start(TOKENS)[0], reader.start(TOKENS)[0]
    reader.read((one, TOKENS[:100]), (two, TOKENS[:20]))
    reader.read((two, TOKENS[20:150]), (one, TOKENS[100:200]))
    for group in reader.cache.pool.groups:
        tables = [dict(enumerate(t.pages, t.first)) for t in group.tables.values()]
        assert all(tables[0][number] == tables[1][number] for number in set(tables[0]) & set(tables[1]))
    rows = reader.read((one, TOKENS[200:]), (two, TOKENS[150:200]))
    want = fresh(name, kv, TOKENS)
    same = np.testing.assert_array_equal if kernels_cpu.in_use() else np.testing.assert_allclose
    same(rows[0], want[200:])
    same(rows[1], want[150:200])


@pytest.mark.long
@every_kind
def test_little_memory_changes_nothing(name, kv):
    """Pages are written again and again, and what is found is what has survived."""
    reader = Reader(name, kv, capacity=640, reuse=512, chunk=320)
    reused = []
    for prompt in [TOKENS[:300], OTHERS[:200], TOKENS[:150] + OTHERS, OTHERS[:200] + TOKENS[:100], TOKENS[:400]] * 2:
        slot, match = reader.start(prompt)
        rows = []
        while len(reader.done[slot]) < len(prompt):
            done = len(reader.done[slot])
            rows.append(reader.read((slot, prompt[done : done + 128]))[0])
            reader.keep(slot)
        reader.cache.release(slot)
        check(name, kv, prompt, (match, np.concatenate(rows)), match.reused)
        reused.append(match.reused)
    assert any(reused)
    assert not reader.cache.usage().used
    reader.cache.pool.index.clear()
    assert reader.cache.usage() == PoolUsage(pages=10)


def test_steps_do_not_change_what_was_kept():
    """The kernels write open pages in place."""
    reader = Reader(FULL, KVFormat())
    slot = reader.start(TOKENS)[0]
    reader.read((slot, TOKENS[:40]))
    reader.keep(slot)
    reader.read((slot, TOKENS[40:50]))
    other, match = reader.start(TOKENS[:20] + OTHERS)
    assert match.reused == 20
    reader.read((other, OTHERS[:30]), (slot, TOKENS[50:60]))
    reader.cache.release(slot)
    check(FULL, KVFormat(), TOKENS, reader.resume(TOKENS), 40)


@pytest.mark.parametrize("held", [1, 4, 9])
def test_states_go_back_over_drafts_that_do_not_hold(held):
    reader = Reader(HYBRID, KVFormat())
    slot, other = reader.start(TOKENS)[0], reader.start(OTHERS)[0]
    reader.read((slot, TOKENS[:70]), (other, OTHERS[:30]))
    wrong = TOKENS[70 : 70 + held] + OTHERS[: 9 - held]
    reader.read((slot, wrong), (other, OTHERS[30:39]), drafts={slot: 8})
    reader.cache.verified(slot, held)
    reader.done[slot] = TOKENS[: 70 + held]
    rows, others = reader.read((slot, TOKENS[70 + held : 200]), (other, OTHERS[39:60]))
    np.testing.assert_allclose(rows, fresh(HYBRID, KVFormat(), TOKENS)[70 + held : 200], atol=2e-5)
    np.testing.assert_allclose(others, fresh(HYBRID, KVFormat(), OTHERS)[39:60], atol=2e-5)


def test_what_depends_on_more_than_tokens_is_kept_apart():
    reader = Reader(FULL, KVFormat())
    reader.leave(TOKENS[:200])
    assert reader.cache.find(TOKENS).reused == 200
    assert reader.cache.find(TOKENS, "an adapter").reused == 0
    private = reader.cache.open(None, None)
    reader.done[private] = []
    reader.read((private, OTHERS))
    reader.keep(private)
    reader.cache.release(private)
    assert reader.cache.find(OTHERS).reused == 0


def test_states_on_the_way_get_fewer_with_distance():
    reader = Reader(HYBRID, KVFormat())
    slot = reader.start(TOKENS)[0]
    for start in range(0, 576, PAGE):
        reader.read((slot, TOKENS[start : start + PAGE]))
    assert sorted(s.position for s in reader.cache.pool.index.snapshots) == [64, 320, 448, 512, 576]
    reader.cache.release(slot)
    check(HYBRID, KVFormat(), TOKENS[:400] + OTHERS, reader.resume(TOKENS[:400] + OTHERS), 320)


def test_bytes_of_what_is_kept_in_windows():
    layers = tiny_model(SLIDING).layers
    size = PagedCache.reuse_bytes(layers, mx.float32)
    assert size == 2 * PagedCache.token_bytes(layers, mx.float32) > PagedCache.reuse_bytes(layers, mx.float32, KVFormat(4, 4)) > 0
    assert PagedCache.reuse_bytes(tiny_model(FULL).layers, mx.float32) == 0
