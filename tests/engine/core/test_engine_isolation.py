"""No request sees data of another. Each has its own range of the vocabulary, and the model repeats its input."""

import mlx.core as mx
import numpy as np
import pytest
from support.engines.parrot import VOCABULARY, parrot
from support.engines.tiny_engine import request

from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.config import EngineConfig
from mlxinfer.engine.core.engine import Engine

ROWS, OWN = 8, VOCABULARY // 8


@pytest.mark.parametrize("kv", [pytest.param("16", marks=pytest.mark.slow), pytest.param("4", marks=pytest.mark.long)])
def test_each_row_speaks_of_its_own_range_only(kv):
    config = EngineConfig(max_context=512, kv_cache_tokens=640, max_num_batched_tokens=48, max_num_seqs=6)
    engine = Engine(parrot(), config, dtype=mx.float32, kv=KVFormat.parse(kv))
    rng = np.random.default_rng(0)
    sequences = []
    for i in range(40):
        row = i % ROWS
        # The first come together, and each grows to more than its share of the pages.
        length, limit, gap = (10, 250, 0) if i < ROWS else (int(rng.integers(1, 200)), int(rng.integers(1, 250)), int(rng.integers(0, 12)))
        prompt = rng.integers(row * OWN, (row + 1) * OWN, length).tolist()
        sequences.append(request(prompt, limit, temperature=1.0, seed=i))
        engine.add(sequences[-1])
        for _ in range(gap):
            engine.step()
        if i >= ROWS and rng.random() < 0.3:
            engine.abort(sequences[int(rng.integers(ROWS, len(sequences)))])
    while not engine.idle:
        engine.step()
    said = [(i % ROWS, token) for i, s in enumerate(sequences) for token in s.answer]
    assert len(said) > 1000
    assert all(token // OWN == row for row, token in said)
    assert engine.stats().preemptions > 0


def test_the_model_repeats_what_it_sees():
    """Otherwise the test above could not fail."""
    engine = Engine(parrot(), EngineConfig(max_context=512, kv_cache_tokens=1024, max_num_batched_tokens=48), dtype=mx.float32)
    sequences = [request([3, 90] * 40, 30, temperature=1.0, seed=seed) for seed in range(8)]
    for sequence in sequences:
        engine.add(sequence)
    while not engine.idle:
        engine.step()
    assert {token for s in sequences for token in s.answer} == {3, 90}
