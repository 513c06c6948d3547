"""Every newer family with settings drawn at random: its logits are those of transformers, however the tokens are cut, by plain MLX and by
what the engine runs."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.plain_weights import PlainWeights
from support.random_settings import BASE, FAMILIES, Draw
from support.tiny import logits_of, open_model, random_tokens, transformers_logits, write_with_transformers

from mlxinfer.cache.base import Segment
from mlxinfer.cache.paged import PagedCache
from mlxinfer.models import build
from mlxinfer.models.decoder import Model
from mlxinfer.nn.packing import settle

pytestmark = pytest.mark.torch

LIMIT = 2e-3
TOKENS = random_tokens(100, vocab=BASE["vocab_size"])


def paged_logits(model: Model, pieces: list[int]) -> np.ndarray:
    """float32 `[T, vocab]`, read in pieces into the cache of an engine."""
    cache = PagedCache(model.layers, dtype=mx.float32, kv_cache_tokens=1024, chunk=256)
    slot, rows, past = cache.open(), [], 0
    for count in pieces:
        step = cache.begin([Segment(slot, 0, count, past, len(TOKENS))])
        logits = model.logits(model.hidden(mx.array(TOKENS[past : past + count], mx.int32), step))
        mx.eval(logits, step.state)
        past += count
        cache.commit(step, {slot: TOKENS[:past]})
        rows.append(np.array(logits))
    return np.concatenate(rows)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", FAMILIES)
def test_logits(family: str, seed: int, tmp_path: Path) -> None:
    settings = FAMILIES[family](Draw(seed, *family.encode()))
    expected = transformers_logits(write_with_transformers(tmp_path, family, seed, **BASE, **settings), TOKENS)
    plain = open_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    packed = build(config, PlainWeights.open(tmp_path / "model.safetensors"), ready=settle)
    for logits in (logits_of(plain, TOKENS), logits_of(plain, TOKENS, [33, 1, 66]), paged_logits(packed, [70, 1, 2, 1, 5, 1, 20])):
        assert np.abs(logits - expected).max() < LIMIT, settings
