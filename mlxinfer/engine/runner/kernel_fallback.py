"""What an engine does after a step that failed because of a GPU kernel: it gives the kernel up. GGUF blocks that it multiplied are unpacked
once, in memory that the plan has left or that the cache gives up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import mlx.core as mx

from ...cache.attention.native import AttentionBackend
from ...cache.attention.select import give_up_kernels, may_be_kernels
from ...cache.kv_format import KVFormat
from ...cache.paged import PagedCache
from ...cache.store import LayerStore
from ...config import EngineConfig
from ...models.decoder import Model
from ...nn.kernel_trial import give_up
from ...nn.unpacking import Unpacking, unpacking

TakeMemory = Callable[[int], int]
"""Asks for so many bytes beyond the plan; returns how many of them may be used from now on."""


def give_up_guilty(error: BaseException, layers: Iterable[tuple[LayerStore, AttentionBackend]], *, replays: bool) -> bool:
    """Do without the kernels that fail their trial now, else without `replays` if there were any, else without the kernels of attention in
    these layers, else without all others. Returns False where nothing that is in use can have caused the error."""
    if not may_be_kernels(error):
        return False
    return give_up(error, guilty=True) or replays or give_up_kernels(layers, error) or give_up(error, guilty=False)


def unpack_once(
    models: Sequence[Model], config: EngineConfig, dtype: mx.Dtype, kv: KVFormat, take: TakeMemory
) -> tuple[Unpacking, EngineConfig, list[str]]:
    """The matrices to unpack, the configuration of the engine with what they leave to the cache, and what it costs, for people. `models`
    are the engine's own and that which drafts. Nothing is unpacked yet: the old cache may still hold the memory."""
    wanted = unpacking(models, dtype)
    if not wanted.total:
        return wanted, config, []
    token = PagedCache.token_bytes(models[0].layers, dtype, kv)
    spare, cached = take(wanted.nbytes), int(max(config.kv_cache_tokens - config.max_context, 0) * token)
    chosen = unpacking(models, dtype, spare + cached)
    less = math.ceil(max(chosen.nbytes - spare, 0) / token) if token else 0
    tokens = config.kv_cache_tokens - less
    line = f"{len(chosen.chosen)} of {chosen.total} matrices of GGUF blocks are unpacked once, which takes {chosen.nbytes / 1e6:.0f} MB"
    if less:
        line += f", so that the cache holds {tokens} tokens instead of {config.kv_cache_tokens}"
    if len(chosen.chosen) < chosen.total:
        line += "; the others are unpacked for every product until the model is loaded again"
    return chosen, replace(config, kv_cache_tokens=tokens, prefix_cache_tokens=min(config.prefix_cache_tokens, tokens)), [line]
