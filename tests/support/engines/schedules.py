"""Random work for an engine: requests that come, share prefixes and are cancelled at any step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mlxinfer.engine.core.engine import Engine
from mlxinfer.engine.core.events import Token
from mlxinfer.engine.core.sequence import Sequence

from .tiny_engine import request

WAYS: tuple[dict[str, object], ...] = (
    {},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 1.1, "top_k": 12, "seed": 4},
    {"temperature": 0.8, "top_p": 0.8, "min_p": 0.02, "seed": 5},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.7, "presence_penalty": 0.8, "logit_bias": {5: 3.0, 17: -50.0}, "seed": 6},
    {"logprobs": 3},
)


@dataclass(frozen=True, slots=True)
class Kind:
    """One of the requests that a schedule draws from; its answer alone is known."""

    prompt: tuple[int, ...]
    limit: int
    way: int

    def sequence(self, client_id: str = "", priority: int = 0) -> Sequence:
        plain = request(list(self.prompt), self.limit, **WAYS[self.way])
        return Sequence(plain.prompt, plain.params, plain.seed, plain.max_length, client_id=client_id, priority=priority)


def kinds(seed: int, count: int, longest: int, vocabulary: int = 96) -> list[Kind]:
    """Prompts that begin with one of a few common beginnings, at page ends and off them, or with nothing in common."""
    rng = np.random.default_rng(seed)
    trunk = rng.integers(3, vocabulary, longest).tolist()
    found = []
    for i in range(count):
        length = int(rng.integers(1, longest))
        shared = int(rng.choice([0, 1, 20, 63, 64, 65, 100, 128, length]))
        prompt = [*trunk[: min(shared, length)], *rng.integers(3, vocabulary, max(length - shared, 0)).tolist()]
        found.append(Kind(tuple(prompt), int(rng.integers(1, 40)), i % len(WAYS)))
    return found


@dataclass(slots=True)
class Outcome:
    kind: Kind
    sequence: Sequence
    tokens: list[int]


def play(engine: Engine, pool: list[Kind], rng: np.random.Generator, *, requests: int, cancelled: float = 0.2) -> list[Outcome]:
    """Run a random schedule to its end; what events told of each request."""
    seen: dict[Sequence, Outcome] = {}

    def advance() -> None:
        for event in engine.step():
            if isinstance(event, Token):
                seen[event.sequence].tokens.append(event.token_id)

    for _ in range(requests):
        kind = pool[int(rng.integers(len(pool)))]
        sequence = kind.sequence(f"client {rng.integers(3)}", int(rng.integers(2)))
        seen[sequence] = Outcome(kind, sequence, [])
        engine.add(sequence)
        for _ in range(int(rng.integers(0, 6))):
            advance()
        running = [*engine.scheduler.running, *engine.scheduler.waiting]
        if running and rng.random() < cancelled:
            engine.abort(running[int(rng.integers(len(running)))])
    while not engine.idle:
        advance()
    return list(seen.values())
