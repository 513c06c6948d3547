"""Whether a model fits in the memory of the device, decided before a weight is read."""

from __future__ import annotations

import math

import mlx.core as mx

from ..cache.base import PAGE
from ..cache.kv_format import KVFormat
from ..cache.paged import PagedCache
from ..device import device_memory
from ..errors import MemoryPlanError
from ..models.decoder import Model
from ..nn.weights import Format
from .formats import FIXED
from .weights import MetaWeights, Planned, can_quantize

_LEAST_CONTEXT = 4 * PAGE
_MOST_BLOCK_SCALE = 4
"""Bytes that a group has for its scale and bias in the blocks of a GGUF file."""


def check_memory(planned: MetaWeights, model: Model, dtype: mx.Dtype, quantize: Format | None, kv: KVFormat | None = None) -> None:
    """Raise `MemoryPlanError` unless the weights, the largest tensor once more while it is cast, and a small cache fit."""
    sizes = [tensor_bytes(tensor, dtype, quantize) for tensor in planned.tensors.values()]
    weights, working = sum(sizes), max(sizes, default=0)
    cache = PagedCache.token_bytes(model.layers, dtype, kv) * _LEAST_CONTEXT
    usable = device_memory().usable
    if weights + working + cache > usable:
        raise MemoryPlanError(
            f"the weights take {_gib(weights)} GiB and loading them {_gib(working)} GiB more, but this device can use {_gib(usable)} GiB: "
            "choose a smaller model, or fewer bits"
        )


def tensor_bytes(planned: Planned, dtype: mx.Dtype, quantize: Format | None) -> int:
    """Bytes of one tensor in memory, once loaded."""
    request, stored = planned.request, planned.stored
    if quantize and request.quantizable and not isinstance(stored, Format) and can_quantize(request.shape, quantize):
        stored = quantize
    count = math.prod(request.shape)
    if not isinstance(stored, Format):
        return count * (request.dtype or dtype).size
    scale = 2 * dtype.size if stored.mode == "affine" else 1 if stored.mode in FIXED else _MOST_BLOCK_SCALE
    return count * stored.bits // 8 + count // stored.group_size * scale


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f}"
