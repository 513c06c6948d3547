"""Random prompts that begin alike, in a small memory over a small disk, with restarts: the logits are always the right ones."""

import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines.disk_cache import TOKENS, Reader
from support.processes.examples import examples

from mlxinfer.cache.kv_format import KVFormat

KV = KVFormat(4, 4, first16=True)
LENGTH = 420
PROMPTS = [TOKENS[:LENGTH], [*TOKENS[:130], *TOKENS[1000:1290]], [*TOKENS[:200], *TOKENS[2000:2220]], TOKENS[3000 : 3000 + LENGTH]]


@cache
def expected(name: str, prompt: int) -> np.ndarray:
    reader = Reader(name, None, KV)
    return reader.read([(reader.open(), PROMPTS[prompt])])[0]


MOVES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(2, LENGTH), st.sampled_from(["prefetch", "tidy", "neither", "restart"])), max_size=14
)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", pytest.param("qwen3_next", marks=pytest.mark.long)])
@settings(max_examples=examples(15))
@given(moves=MOVES, pages=st.integers(8, 20), files=st.integers(10, 60))
def test_any_history(name, moves, pages, files):
    with tempfile.TemporaryDirectory() as directory:

        def started():
            return Reader(name, Path(directory), KV, kv_cache_tokens=64 * pages, prefix_cache_tokens=64 * pages, limit=files * 16000)

        reader = started()
        for prompt, length, move in moves:
            if move == "restart":
                reader.cache.close(60)
                reader = started()
            tokens = PROMPTS[prompt][:length]
            if move in ("prefetch", "restart"):
                reader.prefetch(tokens)
            slot = reader.open(tokens)
            there = reader.past[slot]
            middle = (there + length) // 2
            for start, end in ((there, middle), (middle, length)):
                if end > start:
                    (rows,) = reader.read([(slot, tokens[start:end])])
                    assert np.array_equal(rows, expected(name, prompt)[start:end])
                    reader.cache.keep(slot, tokens[:end])
            reader.cache.release(slot)
            if move == "tidy":
                reader.flush()
        assert not reader.tier.note
        reader.cache.pool.index.clear()
        assert all(a.free == a.capacity for group in reader.cache.pool.groups for a in group.allocators)
        reader.cache.close(60)
