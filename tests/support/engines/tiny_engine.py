"""A tiny real model (random weights, 96 tokens) and an engine over it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.config import EngineConfig
from mlxinfer.engine.core.engine import Engine
from mlxinfer.engine.core.events import Logits, Token
from mlxinfer.engine.core.sequence import Sequence
from mlxinfer.models import build
from mlxinfer.models.decoder import Model
from mlxinfer.sampling import sample_seed
from mlxinfer.types import SamplingParams

from ..models.plain_weights import PlainWeights
from ..oracles.plain_step import PlainCache

UNMEASURED = {"decode_share": 1e-6, "max_step_s": 1000.0}
"""Settings with which no prompt waits because of the time that steps take: requests meet alike on a machine that stalls."""
GOLDEN = Path(__file__).parents[2] / "golden" / "arch"


@cache
def tiny_model(name: str = "llama") -> Model:
    folder = GOLDEN / name
    config = json.loads((folder / "config.json").read_text())
    return build(config, PlainWeights.open(folder / "model.safetensors"))


def tiny_engine(name: str = "llama", kv: KVFormat | None = None, **settings: Any) -> Engine:
    values = {"max_context": 256, "kv_cache_tokens": 4096, "max_num_batched_tokens": 64, "max_num_seqs": 8} | settings
    return Engine(tiny_model(name), EngineConfig(**values), dtype=mx.float32, kv=kv)


def request(prompt: list[int], limit: int = 40, index: int = 0, stop_ids: Iterable[int] = (), **params: object) -> Sequence:
    params.setdefault("temperature", 0.0)
    settings = SamplingParams(**params)
    return Sequence(prompt, settings, sample_seed(settings.seed or 0, index), len(prompt) + limit, frozenset(stop_ids), index)


def run(engine: Engine, sequences: list[Sequence]) -> list[list[int]]:
    """Add all, run to the end, and check that events tell the same as the sequences."""
    for sequence in sequences:
        engine.add(sequence)
    seen: dict[Sequence, list[int]] = {}
    while not engine.idle:
        for event in engine.step():
            assert isinstance(event, Token)
            seen.setdefault(event.sequence, []).append(event.token_id)
    for sequence, tokens in seen.items():
        assert sequence.answer == tokens
    return [s.answer for s in sequences]


def greedy(prompt: list[int], count: int, name: str = "llama") -> list[int]:
    """Return the greedy tokens of full recomputation at each token, without cache and engine."""
    model, tokens = tiny_model(name), list(prompt)
    for _ in range(count):
        step = PlainCache(model.layers).step([(0, len(tokens))])
        hidden = model.hidden(mx.array(tokens, dtype=mx.int32), step)
        tokens.append(int(np.argmax(np.array(model.logits(hidden[-1:])))))
    return tokens[len(prompt) :]


def all_logits(engine: Engine, tokens: list[int]) -> np.ndarray:
    sequence = Sequence(tokens, SamplingParams(), 0, len(tokens), wants_logits=True)
    engine.add(sequence)
    rows: list[mx.array] = []
    while not engine.idle:
        rows += [e.rows for e in engine.step() if isinstance(e, Logits) and e.sequence is sequence]
    return np.array(mx.concatenate(rows))
