"""Which way of attention a layer takes."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .. import kernels_cpu
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
    return _NATIVE if kernels_cpu.in_use() else _PLAIN


def attention_lines(layers: Sequence[LayerSpec], kv: KVFormat, dtype: mx.Dtype) -> list[str]:
    """Which layers attend in which way."""
    ways = {
        index: attention_backend(LayerStore(spec, dtype, kv)).name for index, spec in enumerate(layers) if isinstance(spec, AttentionSpec)
    }
    return by_layers(ways)
