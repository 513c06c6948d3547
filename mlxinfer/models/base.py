"""What the engine sees of a model."""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from ..cache.base import LayerSpec, Step


class Model(Protocol):
    """A causal language model over one flat row of tokens. Holds weights only; all state is in the cache."""

    model_type: str
    vocab_size: int
    max_context: int
    """Positions that the config allows."""
    layers: tuple[LayerSpec, ...]
    """What each layer keeps; the cache is laid out from it."""
    recompute_at: int | None
    """A length whose crossing changes how every token is rotated (longrope): the engine then computes the sequence anew."""
    notes: tuple[str, ...]
    """What the user should be told at load."""

    def rotation(self, length: int) -> tuple[int, ...]:
        """Equal for lengths of a sequence at which its tokens are rotated alike."""
        ...

    def hidden(self, tokens: mx.array, step: Step) -> mx.array:
        """int32 `[T]` to the last layer's normed states `[T, hidden]`, keys and values appended to the cache."""
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """`[R, hidden]` to `[R, vocab]`, float32, with the model's own scaling and cap."""
        ...
