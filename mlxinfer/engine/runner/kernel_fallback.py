"""Disables a GPU kernel after a step failed because of it. GGUF blocks that it multiplied are unpacked once, into memory that the plan left
or the cache yields."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import mlx.core as mx

from ...cache.attention.native import AttentionBackend
from ...cache.attention.select import disable_attention_kernels, may_be_kernels
from ...cache.kv_format import KVFormat
from ...cache.paged import PagedCache
from ...cache.store import LayerStore
from ...config import EngineConfig
from ...kernels_metal.kernel_trial import disable
from ...models.decoder import Model
from ...nn.linear import Embedding, Linear
from ...nn.packing import holders
from ...nn.small_batch_matmul import UNPACKED_BYTES, block_rows, multiplies_blocks
from ...nn.weights import Blocks, Dense
from ...util.dataclass import dataclass

TakeMemory = Callable[[int], int]
"""Requests bytes beyond the plan; returns how many of them may be used from now on."""


@dataclass(frozen=True, slots=True)
class Unpacking:
    """Matrices of GGUF blocks to unpack to 16 bits, because their kernel is disabled."""

    chosen: list[Linear | Embedding]
    """Layers with these matrices."""
    total: int
    """Number of matrices without a kernel; those not chosen are unpacked for every product."""
    nbytes: int
    """Growth of all chosen matrices together."""
    dtype: mx.Dtype
    """Dtype of the unpacked numbers, that of activations."""

    def run(self) -> None:
        """Unpack the matrices one by one."""
        for holder in self.chosen:
            if isinstance(holder.matrix, Blocks):
                holder.matrix = _unpacked(holder.matrix, self.dtype)


def unpacking(models: Iterable[object], dtype: mx.Dtype, room: float = math.inf) -> Unpacking:
    """Choose matrices whose kernel is disabled and that grow by at most `room` bytes together."""
    chosen: list[Linear | Embedding] = []
    total = nbytes = 0
    for model in models:
        for holder in holders(model):
            matrix = holder.matrix
            if not isinstance(matrix, Blocks) or len(matrix.shape) != 2 or multiplies_blocks(matrix.format, dtype):
                continue  # matrices of experts never have a kernel
            total += 1
            growth = math.prod(matrix.shape) * dtype.size - matrix.weight.nbytes
            if nbytes + growth <= room:
                chosen.append(holder)
                nbytes += growth
    return Unpacking(chosen, total, nbytes, dtype)


def _unpacked(matrix: Blocks, dtype: mx.Dtype) -> Dense:
    """Unpack in slices, because numbers are float32 before they are rounded."""
    rows, columns = matrix.shape
    step = max(UNPACKED_BYTES // (columns * dtype.size) // 16 * 16, 16)
    pieces = []
    for at in range(0, rows, step):
        pieces.append(block_rows(matrix.weight[at : at + step], matrix.format, dtype))
        mx.eval(pieces[-1])
    weight = pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)
    mx.eval(weight)
    return Dense(weight)


def disable_guilty(error: BaseException, layers: Iterable[tuple[LayerStore, AttentionBackend]], *, replays: bool) -> bool:
    """Disable the kernels that fail their trial now; else replays, if `replays`; else attention kernels in these layers; else all others.
    Return False if nothing in use can have caused the error."""
    if not may_be_kernels(error):
        return False
    return disable(error, guilty=True) or replays or disable_attention_kernels(layers, error) or disable(error, guilty=False)


def unpack_once(
    models: Sequence[Model], config: EngineConfig, dtype: mx.Dtype, kv: KVFormat, take: TakeMemory
) -> tuple[Unpacking, EngineConfig, list[str]]:
    """Return the matrices to unpack, the engine's configuration with the cache that remains, and the costs, for people.

    `models` are the engine's model and its draft model. Nothing is unpacked yet, because the old cache may still use the memory.
    """
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
