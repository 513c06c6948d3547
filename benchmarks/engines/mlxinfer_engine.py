"""This project, through `LLM` and its engine."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from mlxinfer import LLM, SamplingParams

from .base import Answer, Engine

if TYPE_CHECKING:
    from mlxinfer.bench.measure import Bench
    from mlxinfer.engine.core.sequence import Sequence

MOST_STEPS = 256


class MLXInfer(Engine):
    def load(self, model: str, *, threads: int, context: int, prompt: str) -> Answer:
        self.llm = LLM(model, speculate=False, prefix_cache=False)
        text = self.llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1))[0].text
        self._held: dict[tuple[int, int, int], list[Sequence]] = {}
        self._engines = {16: self.llm.engine}
        self._open = ExitStack()
        return {"text": text}

    def about(self) -> Answer:
        from importlib.metadata import version  # not before the first token

        from mlxinfer.util.background import finish_background_work

        finish_background_work()
        dtype = self.llm.dtype
        details = f"mlx {version('mlx')}, {str(dtype).rpartition('.')[2]}, {_kernels()}"
        return {"version": version("mlxinfer"), "details": details, "weight_bytes": self.llm.weight_bytes, "cache_item_bytes": dtype.size}

    def prefill(self, tokens: int) -> Answer:
        return {"seconds": self._bench().prefill(tokens)}

    def decode(self, depth: int, streams: int, steps: int, kv: int = 16) -> Answer:
        # The cache is filled once. Every measurement runs on copies of its sequences.
        key, bench = (depth, streams, kv), self._bench(kv)
        if key not in self._held:
            self._held[key] = self._open.enter_context(bench.filled(depth, streams, MOST_STEPS))
        return {"seconds": bench.decode(self._held[key], steps)}

    def cost(self, tokens: int, depth: int, streams: int) -> Answer:
        from mlxinfer.bench.roofline import footprint

        engine = self.llm.engine
        sizes = footprint(engine.model, self.llm.config, self.llm.dtype)
        if sizes is None:
            return {}
        weights = replace(sizes, attention=(), state_bytes=0)
        costs = [
            part.prefill(tokens, engine.config.max_num_batched_tokens) if tokens else part.decode(depth, streams)
            for part in (sizes, weights)
        ]
        return {"operations": costs[0].operations, "weight_bytes": costs[1].bytes, "cache_bytes": costs[0].bytes - costs[1].bytes}

    def _bench(self, kv: int = 16) -> Bench:
        # Loading must not import modules that only measure.
        from mlxinfer.bench.measure import Bench
        from mlxinfer.cache.kv_format import KVFormat
        from mlxinfer.engine.core import engine as core

        if kv not in self._engines:
            engine = self.llm.engine
            self._engines[kv] = core.Engine(engine.model, engine.config, dtype=self.llm.dtype, kv=KVFormat.parse(kv))
        return Bench(self._engines[kv])


def _kernels() -> str:
    """Status of the native operations."""
    if find_spec("mlxinfer.kernels_cpu") is None:
        return "no CPU kernels"
    status: str = import_module("mlxinfer.kernels_cpu").status()
    return status


def create() -> MLXInfer:
    return MLXInfer()
