"""Which way of attention a layer takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx

from .. import kernels_cpu
from ..device import default_dtype, is_gpu
from .attention import AttentionBackend, NativeAttention
from .base import AttentionSpec, LayerSpec
from .format import KVFormat
from .plain import PlainAttention
from .report import by_layers
from .store import LayerStore

_NATIVE = NativeAttention()
_PLAIN = PlainAttention()


def attention_backend(store: LayerStore) -> AttentionBackend:
    """Layers with the same answer are prepared together in each step."""
    if kernels_cpu.in_use():
        return _NATIVE
    if not _has_gpu_kernels():
        return _PLAIN
    from .metal import METAL
    from .trial import obstacle

    instead = obstacle(store.spec, store.dtype, store.format)
    return PlainAttention(instead) if instead else METAL


def fallback_lines(layers: Sequence[LayerSpec], kv: KVFormat, dtype: mx.Dtype) -> list[str]:
    """Which layers have to do without the kernels that there are for this device, and why."""
    ways = {
        index: backend.instead for index, backend in _ways(layers, kv, dtype) if isinstance(backend, PlainAttention) and backend.instead
    }
    return [f"attention of {line}: plain MLX instead" for line in by_layers(ways)]


def gpu_status() -> str:
    """Whether the kernels for a GPU work on this one; empty where there is none."""
    if not _has_gpu_kernels():
        return ""
    from .trial import obstacle

    usual = AttentionSpec(8, 128, 128, query_heads=32)
    instead = obstacle(usual, default_dtype(), KVFormat(4, 4))
    return f"attention in plain MLX: {instead}" if instead else "attention by this project's kernels, which have passed their trial"


def attention_lines(layers: Sequence[LayerSpec], kv: KVFormat, dtype: mx.Dtype) -> list[str]:
    """Which layers attend in which way."""
    return by_layers({index: backend.name for index, backend in _ways(layers, kv, dtype)})


def _ways(layers: Sequence[LayerSpec], kv: KVFormat, dtype: mx.Dtype) -> Iterator[tuple[int, AttentionBackend]]:
    for index, spec in enumerate(layers):
        if isinstance(spec, AttentionSpec):
            yield index, attention_backend(LayerStore(spec, dtype, kv))


def _has_gpu_kernels() -> bool:
    """They are imported only where there is a GPU: a program on a CPU starts sooner."""
    if not is_gpu():
        return False
    from ..kernels_metal import executors

    return executors.available()
