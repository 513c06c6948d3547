"""Engines that draft wherever they can, whatever it costs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import mlx.core as mx
import numpy as np

from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.config import EngineConfig
from mlxinfer.engine.core.engine import Engine
from mlxinfer.engine.core.sequence import Sequence
from mlxinfer.engine.core.step_times import StepTimes
from mlxinfer.engine.spec_decode.draft_model import Drafter
from mlxinfer.engine.spec_decode.proposer import Proposer
from mlxinfer.models import build
from mlxinfer.models.decoder import Model

from ..models.plain_weights import PlainWeights
from .tiny_engine import GOLDEN, tiny_model


class Free(StepTimes):
    """Every step takes a second, however many rows it has."""

    def observe(self, rows: int, prefill_rows: int, seconds: float, *, waited: bool = False, turns: int = 0) -> None: ...

    def step(self, rows: int) -> float:
        return 1.0

    def round(self, rows: int) -> float:
        return 1.0


def eager_engine(name: str = "llama", *, draft: Model | None = None, kv: KVFormat | None = None, **settings: int) -> Engine:
    """An engine that always drafts: from `draft`, or from what has been said before."""
    values = {"max_context": 256, "kv_cache_tokens": 4096, "max_num_batched_tokens": 64, "max_num_seqs": 8} | settings
    drafter = Drafter(draft, mx.float32, 0.0001, kv) if draft else None
    engine = Engine(tiny_model(name), EngineConfig(**values), dtype=mx.float32, kv=kv, drafter=drafter)
    proposer = engine.proposer
    proposer.times, proposer.account.share = Free(), 1e9
    proposer.ngrams = draft is None
    return engine


def noisy_model(amount: float, name: str = "llama") -> Model:
    """The tiny model, less and less like itself."""
    folder = GOLDEN / name
    random = np.random.default_rng(1)
    tensors = {}
    for key, exact in dict(mx.load(str(folder / "model.safetensors"))).items():
        noise = mx.array(random.standard_normal(exact.shape).astype(np.float32))
        tensors[key] = exact + amount * mx.std(exact) * noise
    return build(json.loads((folder / "config.json").read_text()), PlainWeights(tensors))


class Guesser:
    """Drafts for tests: what each sequence is going to say (by its prompt), wrong every few tokens."""

    def __init__(self, proposer: Proposer, answers: Mapping[tuple[int, ...], list[int]], seed: int) -> None:
        self.proposer = proposer
        self.answers = answers
        self.random = np.random.default_rng(seed)
        proposer.wants_tokens = lambda running: True  # type: ignore[method-assign]
        proposer.propose = self.propose  # type: ignore[method-assign]

    def propose(self, running: Iterable[Sequence]) -> None:
        for s in running:
            s.propose([])
            room = self.proposer._room(s)
            if s.remaining and s.pending_token is None and len(s.tokens) > len(s.prompt) and room:
                said = len(s.tokens) - len(s.prompt)
                count = int(self.random.integers(0, room + 1))
                future = self.answers[tuple(s.prompt)][said : said + count]
                s.propose([t if self.random.random() < 0.7 else int(self.random.integers(0, 96)) for t in future])
