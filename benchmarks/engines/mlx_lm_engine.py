"""mlx-lm, through the generator of its commands."""

from __future__ import annotations

from collections.abc import Generator
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.generate import batch_generate, generate_step, generation_stream
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

from ..compare.workloads import DEEP
from .base import WARM_STEPS, Answer, Engine, random_tokens


class MLXLM(Engine):
    def load(self, model: str, *, threads: int, context: int, prompt: str) -> Answer:
        self.model, self.tokenizer = load(model)[:2]
        self._filled: dict[tuple[int, int], list[Any]] = {}
        tokens = self._generate(self.tokenizer.encode(prompt), 1)
        text: str = self.tokenizer.decode([next(tokens)])
        _finish(tokens)
        return {"text": text}

    def about(self) -> Answer:
        from importlib.metadata import version  # not before the first token

        leaves: list[tuple[str, mx.array]] = tree_flatten(self.model.parameters())  # type: ignore[assignment]
        dtype = next(array.dtype for name, array in leaves if name.endswith("norm.weight"))
        details = f"mlx {version('mlx')}, {str(dtype).rpartition('.')[2]}"
        size = sum(array.nbytes for _, array in leaves)
        return {"version": version("mlx-lm"), "details": details, "weight_bytes": size, "cache_item_bytes": dtype.size}

    def prefill(self, tokens: int) -> Answer:
        prompt = random_tokens(tokens, self._vocabulary)
        start = perf_counter()
        answer = self._generate(prompt, 1)
        next(answer)
        seconds = perf_counter() - start
        _finish(answer)
        return {"seconds": seconds}

    def decode(self, depth: int, streams: int, steps: int, kv: int = 16) -> Answer:
        if streams != 1:
            return {"seconds": self._decode_many(depth, streams, steps)}
        cache = self._filled.pop((depth, kv), None)
        if cache is None and depth == DEEP:
            cache = self._random_cache(depth, kv)
        prompt = random_tokens(max(depth, 1) if cache is None else 1, self._vocabulary)
        cache = cache or make_prompt_cache(self.model)
        answer = self._generate(prompt, 1 + WARM_STEPS + steps, cache)
        for _ in range(1 + WARM_STEPS):
            next(answer)
        start = perf_counter()
        for _ in range(steps):
            next(answer)
        seconds = perf_counter() - start
        _finish(answer)
        if can_trim_prompt_cache(cache):
            trim_prompt_cache(cache, cache[0].offset - depth)
            self._filled[depth, kv] = cache
        return {"seconds": seconds}

    def _decode_many(self, depth: int, streams: int, steps: int) -> float:
        """Decode with `batch_generate`, which reports its decoding time."""
        prompts = [random_tokens(max(depth, 1), self._vocabulary) for _ in range(streams)]
        stats = batch_generate(self.model, self.tokenizer, prompts, max_tokens=steps).stats
        if stats.generation_tokens != streams * steps:
            raise ValueError(f"{stats.generation_tokens} tokens instead of {streams * steps}: a sequence ended early")
        return float(stats.generation_tokens / stats.generation_tps)

    def _random_cache(self, depth: int, kv: int) -> list[Any]:
        """Fill a cache with random numbers. Reading such a long prompt would take minutes, and attention takes the same time."""
        cache: list[Any] = make_prompt_cache(self.model)
        self.model(mx.array(random_tokens(1, self._vocabulary))[None], cache=cache)
        for layer in cache:
            shapes = [(1, a.shape[1], depth - 1, a.shape[3]) for a in (layer.keys, layer.values)]
            layer.update_and_fetch(*(mx.random.normal(shape).astype(layer.keys.dtype) for shape in shapes))
        if kv != 16:
            cache = [layer.to_quantized(group_size=64, bits=kv) for layer in cache]
        mx.eval([layer.state[:2] for layer in cache])
        return cache

    @property
    def _vocabulary(self) -> int:
        size: int = self.model.args.vocab_size
        return size

    def _generate(self, prompt: list[int], tokens: int, cache: list[Any] | None = None) -> Generator[Any, None, None]:
        return (token for token, _ in generate_step(mx.array(prompt), self.model, max_tokens=tokens, prompt_cache=cache))


def _finish(answer: Generator[Any, None, None]) -> None:
    """End the generator, and wait for the step that it has started ahead, which must not run during the next measurement."""
    answer.close()
    mx.synchronize(generation_stream)


def create() -> MLXLM:
    return MLXLM()
