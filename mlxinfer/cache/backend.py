"""Which way of attention a layer takes."""

from __future__ import annotations

from .. import kernels_cpu
from .attention import AttentionBackend, NativeAttention
from .plain import PlainAttention
from .store import LayerStore

_NATIVE = NativeAttention()
_PLAIN = PlainAttention()


def attention_backend(store: LayerStore) -> AttentionBackend:
    """Layers with the same answer are prepared together in each step."""
    return _NATIVE if kernels_cpu.in_use() else _PLAIN
