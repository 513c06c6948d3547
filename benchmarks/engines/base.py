"""What a worker asks of an engine."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

WARM_STEPS = 2
"""Steps of decoding before the clock starts."""


@dataclass(frozen=True, slots=True)
class About:
    """Who did the work. `weight_bytes` is what it holds of the model, `cache_item_bytes` the size of a cached number."""

    version: str
    details: str
    weight_bytes: int
    cache_item_bytes: int


class Engine(Protocol):
    """One model, loaded once. Times are in seconds, of the work alone; all tokens are chosen greedily."""

    def load(self, model: str, *, threads: int, context: int, prompt: str) -> str:
        """Load the model, for sequences of up to `context` tokens, and give the text of the first token after the prompt."""
        ...

    def about(self) -> About: ...

    def prefill(self, tokens: int) -> float:
        """From a prompt of random tokens to the first token of the answer."""
        ...

    def decode(self, depth: int, streams: int, steps: int, kv: int = 16) -> float:
        """`steps` tokens for each of so many sequences, in one batch, behind prompts of `depth` (at least one) random tokens, whose keys
        and values are kept in so many bits."""
        ...

    def cost(self, tokens: int, depth: int, streams: int) -> dict[str, float]:
        """Of a prompt of `tokens`, or of a step of decoding where that is 0: `operations`, `weight_bytes`, `cache_bytes`. An engine
        that does not know its model's sizes gives nothing."""
        ...


def random_tokens(count: int, vocabulary: int) -> list[int]:
    """The same ones in every engine and in every round."""
    return random.Random(count).choices(range(vocabulary), k=count)
