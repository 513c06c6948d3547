"""A worker that speaks the real protocol, with an engine that computes nothing: its name sets its speeds."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks.engines.base import About  # noqa: E402
from benchmarks.worker import Worker, main  # noqa: E402

SPEEDS = {"mlxinfer": 200.0, "llama.cpp": 100.0, "mlx-lm": 10.0, "mlxinfer-plain": 20.0, "mlxinfer-first": 200.0}
"""Tokens per second."""


class FakeEngine:
    def __init__(self, name: str) -> None:
        if name == os.environ.get("FAKE_MISSING"):
            raise ImportError("No module named 'llama_cpp'")
        self.name = name
        self.speed = SPEEDS[name]

    def load(self, model: str, *, threads: int, context: int, prompt: str) -> str:
        sys.stdout.write("noise that must not reach the answers\n")
        sys.stdout.flush()
        return " Paris"

    def about(self) -> About:
        return About("1.0", "fake", weight_bytes=1000, cache_item_bytes=4 if self.name == "mlxinfer" else 2)

    def prefill(self, tokens: int) -> float:
        if self.name == os.environ.get("FAKE_CRASH"):
            os.write(2, b"free(): invalid pointer\n")
            os._exit(3)
        return tokens / self.speed

    def decode(self, depth: int, streams: int, steps: int, kv: int = 16) -> float:
        return steps / self.speed

    def cost(self, tokens: int, depth: int, streams: int) -> dict[str, float]:
        if self.name != "mlxinfer":
            return {}
        return {"operations": 1e6 * (tokens or streams), "weight_bytes": 1000.0, "cache_bytes": 8.0 * depth * streams}


class FakeWorker(Worker):
    """A worker that does not measure the machine."""

    def do(self, job: Mapping[str, Any]) -> dict[str, Any]:
        if job["do"] == "machine":
            return {"read_bytes": 1e10, "copy_bytes": 2e10, "operations": 3e10}
        return super().do(job)


if __name__ == "__main__":
    main(lambda name: FakeWorker(name, FakeEngine))
