"""Which way of attention a layer takes."""

from __future__ import annotations

from .attention import AttentionBackend
from .plain import PlainAttention
from .store import LayerStore

_PLAIN = PlainAttention()


def attention_backend(store: LayerStore) -> AttentionBackend:
    """Layers with the same answer are prepared together in each step."""
    return _PLAIN
