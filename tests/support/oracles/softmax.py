"""The softmax of attention in float64."""

from __future__ import annotations

import numpy as np

from .sealed_pages import Array


def softmax(scores: Array, softcap: float | None, sinks: Array | None) -> Array:
    """Of scores `[heads, keys]`; `sinks` `[heads]` take part and carry no value."""
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    highest = scores.max(-1, keepdims=True)
    rest = 0.0
    if sinks is not None:
        highest = np.maximum(highest, sinks[:, None])
        rest = np.exp(sinks[:, None] - highest)
    weights = np.exp(scores - highest)
    return weights / (weights.sum(-1, keepdims=True) + rest)
