"""The interface of an engine in a worker."""

from __future__ import annotations

import random
from dataclasses import asdict
from typing import Any

WARM_STEPS = 2
"""Decode steps before the clock starts."""
JOBS = ("load", "about", "prefill", "decode", "cost", "memory", "machine")
Answer = dict[str, Any]


class Engine:
    """One model, loaded once. Times are in seconds, and cover only the work itself. Decoding is greedy.

    An engine without a model measures the machine.
    """

    def load(self, model: str, *, threads: int, context: int, prompt: str) -> Answer:
        """Load the model for sequences of up to `context` tokens. Returns the `text` of the first token after the prompt."""
        raise NotImplementedError

    def about(self) -> Answer:
        """`version`, `details`, `weight_bytes`, and `cache_item_bytes`, the bytes of a cached number."""
        raise NotImplementedError

    def prefill(self, tokens: int) -> Answer:
        """`seconds` from a prompt of random tokens to the first token of the answer."""
        raise NotImplementedError

    def decode(self, depth: int, streams: int, steps: int, kv: int = 16) -> Answer:
        """`seconds` for `steps` tokens of each of `streams` sequences in one batch, after prompts of `depth` (at least one) random tokens,
        with a cache of `kv` bits."""
        raise NotImplementedError

    def cost(self, tokens: int, depth: int, streams: int) -> Answer:
        """`operations`, `weight_bytes` and `cache_bytes` of a prompt of `tokens`, or of a decode step if `tokens` is 0. Empty for an engine
        that does not know its model's sizes."""
        return {}

    def memory(self) -> Answer:
        from mlxinfer.util.device import peak_rss

        return {"peak_rss_bytes": peak_rss()}

    def machine(self, bytes: int) -> Answer:
        """Bytes read, bytes copied and operations per second of the machine."""
        from mlxinfer.bench.machine import measure_machine

        return asdict(measure_machine(bytes))


def random_tokens(count: int, vocabulary: int) -> list[int]:
    """The same tokens in every engine and every round."""
    return random.Random(count).choices(range(vocabulary), k=count)
