"""How much of the device's memory the cache may use, decided before it is used."""

from __future__ import annotations

from ..cache.base import PAGE
from ..cache.format import KVFormat
from ..cache.paged import PagedCache
from ..config import EngineConfig
from ..device import device_memory, is_gpu
from ..errors import MemoryPlanError, PromptError
from ..loading.load import LoadedModel

_GPU_CHUNK = 512
_CPU_CHUNK = 64
"""Rows of a step: the CPU is slow enough that Ctrl-C would wait long for a larger one, and gains nothing from it."""

_SPARE = 256 * 2**20
"""Bytes left for the activations of a step."""


def plan_engine(
    loaded: LoadedModel, *, max_context: int | None = None, max_sequences: int = 16, kv: KVFormat | None = None
) -> EngineConfig:
    """The longest context and the largest cache that fit beside the weights. Raises `MemoryPlanError`."""
    model = loaded.model
    context = model.max_context
    if max_context is not None:
        if not 1 <= max_context <= context:
            raise PromptError(f"the context can be 1 to {context} tokens long for this model, not {max_context}")
        context = max_context
    capacity = context * max_sequences
    per_token = PagedCache.token_bytes(model.layers, loaded.dtype, kv)
    if per_token:
        own = max_sequences * PagedCache.sequence_bytes(model.layers, loaded.dtype, kv)
        room = device_memory().usable - loaded.weight_bytes - _SPARE - own
        capacity = min(capacity, int(room / per_token))
    if capacity < min(context, 4 * PAGE):
        raise MemoryPlanError(
            f"the weights take {loaded.weight_bytes / 2**30:.1f} GiB of the {device_memory().usable / 2**30:.1f} GiB this device can use, "
            "which leaves no room for a cache: use a smaller or more quantized model"
        )
    return EngineConfig(
        max_context=min(context, capacity),
        capacity_tokens=capacity,
        max_step_tokens=_GPU_CHUNK if is_gpu() else _CPU_CHUNK,
        max_sequences=max_sequences,
    )
