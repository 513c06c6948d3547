"""The interface of an engine, as a worker uses it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

WARM_STEPS = 2
"""Decode steps before the clock starts."""


@dataclass(frozen=True, slots=True)
class About:
    """Which engine did the work. `weight_bytes` is what it holds of the model, `cache_item_bytes` the size of a cached number."""

    version: str
    details: str
    weight_bytes: int
    cache_item_bytes: int


class Engine(Protocol):
    """One model, loaded once. Times are in seconds and cover only the work itself; all tokens are chosen greedily."""

    def load(self, model: str, *, threads: int, context: int, prompt: str) -> str:
        """Load the model, for sequences of up to `context` tokens, and return the text of the first token after the prompt."""
        ...

    def about(self) -> About: ...

    def prefill(self, tokens: int) -> float:
        """Time from a prompt of random tokens to the first token of the answer."""
        ...

    def decode(self, depth: int, streams: int, steps: int, kv: int = 16) -> float:
        """Time for `steps` tokens of each of `streams` sequences, in one batch, after prompts of `depth` (at least one) random tokens, with
        keys and values stored in `kv` bits."""
        ...

    def cost(self, tokens: int, depth: int, streams: int) -> dict[str, float]:
        """For a prompt of `tokens`, or for a decode step if that is 0: `operations`, `weight_bytes`, `cache_bytes`. Empty for an engine
        that does not know its model's sizes."""
        ...


def random_tokens(count: int, vocabulary: int) -> list[int]:
    """The same tokens in every engine and every round."""
    return random.Random(count).choices(range(vocabulary), k=count)
