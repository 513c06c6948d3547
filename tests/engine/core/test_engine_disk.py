"""An engine finds the prefixes that an earlier one stored on disk."""

import mlx.core as mx
import pytest
from support.engines.tiny_engine import request, run, tiny_model
from support.models.tiny import random_tokens

from mlxinfer.cache.disk.storage import DiskStorage
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.config import EngineConfig
from mlxinfer.engine.core.engine import Engine

TOKENS = random_tokens(300)


def engine(name, directory, kv):
    config = EngineConfig(max_context=512, kv_cache_tokens=4096, max_num_batched_tokens=64, max_num_seqs=8)
    return Engine(tiny_model(name), config, dtype=mx.float32, kv=kv, fingerprint=name, disk=DiskStorage(directory, 10**9))


@pytest.mark.parametrize(
    ("name", "kv"),
    [
        pytest.param(
            name, kv, marks=pytest.mark.long if (name == "llama") == bool(kv.first16) else pytest.mark.slow, id=f"{name}-{kv.name}"
        )
        for name in ("llama", "gemma3_text", "qwen3_next")
        for kv in (KVFormat(), KVFormat(4, 4, first16=True))
    ],
)
def test_a_restart(name, kv, tmp_path):
    prompts = [TOKENS[:200], [*TOKENS[:150], *TOKENS[200:260]], TOKENS]
    first = engine(name, tmp_path, kv)
    expected = [run(first, [request(p, seed=3, temperature=1.0)]) for p in prompts]
    first.close(60)
    second = engine(name, tmp_path, kv)
    sequences = [request(p, seed=3, temperature=1.0) for p in prompts]
    running = request(random_tokens(90)[::-1], limit=60)
    second.add(running)
    for _ in range(5):
        second.step()
    for sequence in sequences:
        second.add(sequence)
    while not second.idle:
        second.step()
    assert [[s.answer] for s in sequences] == expected
    assert all(s.reused_tokens >= 128 for s in sequences)
    second.close(60)


def test_closing_ends_what_runs(tmp_path):
    made = engine("llama", tmp_path, KVFormat())
    sequence = request(TOKENS, limit=100)
    made.add(sequence)
    for _ in range(8):
        made.step()
    made.close(60)
    assert sequence.finish_reason == "cancelled"
    again = engine("llama", tmp_path, KVFormat())
    sequence = request(TOKENS)
    run(again, [sequence])
    assert sequence.reused_tokens >= 256
    again.close(60)
