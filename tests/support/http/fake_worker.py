"""A worker with the real protocol and an engine that computes nothing. The engine's name sets its speeds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks.common.worker import main  # noqa: E402
from benchmarks.engines.base import Answer, Engine  # noqa: E402

SPEEDS = {"mlxinfer": 200.0, "llama.cpp": 100.0, "mlx-lm": 10.0, "mlxinfer-plain": 20.0, "mlxinfer-first": 200.0}
"""Tokens per second."""


class FakeEngine(Engine):
    def __init__(self, name: str) -> None:
        if name == os.environ.get("FAKE_MISSING"):
            raise ImportError("No module named 'llama_cpp'")
        self.name = name
        self.speed = SPEEDS.get(name, 1.0)

    def load(self, model: str, *, threads: int, context: int, prompt: str) -> Answer:
        sys.stdout.write("noise that must not reach the answers\n")
        sys.stdout.flush()
        return {"text": " Paris"}

    def about(self) -> Answer:
        return {"version": "1.0", "details": "fake", "weight_bytes": 1000, "cache_item_bytes": 4 if self.name == "mlxinfer" else 2}

    def prefill(self, tokens: int) -> Answer:
        if self.name == os.environ.get("FAKE_CRASH"):
            os.write(2, b"free(): invalid pointer\n")
            os._exit(3)
        return {"seconds": tokens / self.speed}

    def decode(self, depth: int, streams: int, steps: int, kv: int = 16) -> Answer:
        return {"seconds": steps / self.speed}

    def cost(self, tokens: int, depth: int, streams: int) -> Answer:
        if self.name != "mlxinfer":
            return {}
        return {"operations": 1e6 * (tokens or streams), "weight_bytes": 1000.0, "cache_bytes": 8.0 * depth * streams}

    def machine(self, bytes: int) -> Answer:
        return {"read_bytes": 1e10, "copy_bytes": 2e10, "operations": 3e10}


if __name__ == "__main__":
    main(FakeEngine)
