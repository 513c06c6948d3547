"""A prompt's logits do not depend on how it is read: in chunks of any size, alone or beside others, forked or not, for every format."""

import mlx.core as mx
import numpy as np
import pytest
from support.engines.tiny_engine import tiny_engine, tiny_model
from support.models.tiny import random_tokens

from mlxinfer.cache.attention.reference import PlainAttention
from mlxinfer.cache.attention.select import attention_backend
from mlxinfer.cache.base import AttentionSpec, Segment
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.cache.paged import PagedCache
from mlxinfer.engine.core.sequence import Sequence
from mlxinfer.types import SamplingParams

TOKENS = random_tokens(1000)
FULL, SLIDING, SINKS, SOFTCAP, HYBRID = "llama", "gemma3_text", "gpt_oss", "gemma2", "qwen3_next"
ATOL = 2e-5
LENGTH = 600
"""Tokens of a prompt: longer than all windows, and many pages."""


class Reader:
    """A model with a cache of one format, fed with pieces of prompts."""

    def __init__(self, name: str, kv: KVFormat, backend=attention_backend):
        self.model = tiny_model(name)
        self.cache = PagedCache(self.model.layers, dtype=mx.float32, kv_cache_tokens=1 << 14, chunk=1000, kv=kv, backend=backend)
        self.past: dict[int, int] = {}

    def open(self) -> int:
        slot = self.cache.open()
        self.past[slot] = 0
        return slot

    def read(self, parts: list[tuple[int, list[int]]]) -> list[np.ndarray]:
        """Logits of the pieces of (slot, tokens) in one step."""
        segments, start = [], 0
        for slot, tokens in parts:
            segments.append(Segment(slot, start, len(tokens), self.past[slot], len(TOKENS)))
            self.past[slot] += len(tokens)
            start += len(tokens)
        step = self.cache.begin(segments)
        logits = self.model.logits(self.model.hidden(mx.array([t for _, tokens in parts for t in tokens], mx.int32), step))
        mx.eval(logits, step.state)
        if step.needs_commit:
            self.cache.commit(step)
        return [np.array(logits[s.start : s.start + s.count]) for s in segments]


def in_chunks(name: str, kv: KVFormat, chunks: list[int], backend=attention_backend, tokens: int = LENGTH) -> np.ndarray:
    """The chunks again and again, until so many tokens of the prompt are read."""
    reader, rows, done = Reader(name, kv, backend), [], 0
    slot = reader.open()
    while done < tokens:
        count = min(chunks[len(rows) % len(chunks)], tokens - done)
        rows += reader.read([(slot, TOKENS[done : done + count])])
        done += count
    return np.concatenate(rows)


@pytest.mark.parametrize(
    ("name", "kv"),
    [
        (FULL, KVFormat()),
        pytest.param(FULL, KVFormat(8, 8), marks=pytest.mark.long),
        (FULL, KVFormat(2, 2, first16=True)),
        (SLIDING, KVFormat(4, 4)),
        pytest.param(SLIDING, KVFormat(6, 6, first16=True), marks=pytest.mark.long),
        (SINKS, KVFormat(8, 4)),
        pytest.param(SINKS, KVFormat(3, 3), marks=pytest.mark.long),
        (SOFTCAP, KVFormat(4, 4, first16=True)),
        pytest.param(SOFTCAP, KVFormat(5, 16), marks=pytest.mark.long),
        pytest.param(HYBRID, KVFormat(4, 4), marks=pytest.mark.long),
        (HYBRID, KVFormat(16, 5)),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_chunks_change_nothing(name, kv):
    whole = in_chunks(name, kv, [1000])
    for chunks, tokens in (([64], LENGTH), ([100], LENGTH), ([7, 7, 7, 7, 1, 1], 200)):
        np.testing.assert_allclose(in_chunks(name, kv, chunks, tokens=tokens), whole[:tokens], atol=ATOL, err_msg=str(chunks))


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.long) for name in (SINKS, HYBRID)),
        *(pytest.param(name, marks=pytest.mark.slow) for name in (SLIDING, SOFTCAP)),
    ],
)
def test_plain_mlx_computes_the_same(name):
    """A key that is rounded differently in its last bit can get the next code, so the two agree less than each with itself."""
    kv, plain = KVFormat(5, 4, first16=True), PlainAttention()
    whole = in_chunks(name, kv, [1000], lambda store: plain)
    np.testing.assert_allclose(in_chunks(name, kv, [100, 7, 64, 1, 250], lambda store: plain), whole, atol=ATOL)
    other = np.abs(in_chunks(name, kv, [1000]) - whole)
    assert other.mean() < 1e-3
    assert np.median(other) < ATOL


def test_one_token_at_a_time_changes_nothing():
    kv = KVFormat(4, 4)
    np.testing.assert_allclose(in_chunks(SINKS, kv, [1], tokens=330), in_chunks(SINKS, kv, [1000])[:330], atol=ATOL)


@pytest.mark.parametrize("name", [FULL, SLIDING, *(pytest.param(name, marks=pytest.mark.long) for name in (SINKS, SOFTCAP, HYBRID))])
def test_fewer_bits_lose_more(name):
    """Against 16 bits; models of random weights tell nothing of how much."""
    exact = in_chunks(name, KVFormat(), [1000])
    eight, three = (np.abs(in_chunks(name, KVFormat(bits, bits), [1000]) - exact).mean() for bits in (8, 3))
    assert 0 < eight < three / 2


@pytest.mark.parametrize("name", [FULL, SLIDING, HYBRID])
def test_neighbours_and_forks_change_nothing(name):
    kv = KVFormat(4, 3, first16=True)
    alone = in_chunks(name, kv, [100])
    reader = Reader(name, kv)
    one, two = reader.open(), reader.open()
    got = reader.read([(one, TOKENS[:130]), (two, TOKENS[:40])])
    np.testing.assert_allclose(got[0], alone[:130], atol=ATOL)
    reader.read([(two, TOKENS[500:700]), (one, TOKENS[130:131])])
    three = reader.cache.fork(one)
    reader.past[three] = 131
    reader.read([(one, TOKENS[300:400])])
    reader.cache.release(one)
    got = reader.read([(two, TOKENS[10:11]), (three, TOKENS[131:300])])
    np.testing.assert_allclose(got[1], alone[131:300], atol=ATOL)


@pytest.mark.parametrize("chunk", [1, 50, 256])
def test_the_engine_reads_as_the_model_does(chunk):
    kv = KVFormat(4, 4)
    engine = tiny_engine(SLIDING, kv=kv, max_num_batched_tokens=chunk, max_num_seqs=1)
    sequence = Sequence(TOKENS[:200], SamplingParams(), 0, 200, wants_logits=True)
    engine.add(sequence)
    rows = []
    while not engine.idle:
        rows += [np.array(event.rows) for event in engine.step()]
    np.testing.assert_allclose(np.concatenate(rows), in_chunks(SLIDING, kv, [1000])[:200], atol=ATOL)


def test_models_of_all_these_kinds_are_tried():
    specs = {name: tiny_model(name).layers for name in (FULL, SLIDING, HYBRID)}
    assert all(isinstance(s, AttentionSpec) and s.window is None for s in specs[FULL])
    assert {s.window is None for s in specs[SLIDING]} == {True, False}
    assert len({type(s) for s in specs[HYBRID]}) == 2
