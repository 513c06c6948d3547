"""Probabilities of whole vocabularies, and how far two sets of them are apart. On a CPU NumPy computes them: in a quarter of MLX's time,
and its sums of 262,144 exponentials are off by 3e-7 in the logarithm instead of 7e-5."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..util.device import is_gpu


def logprobs_of(logits: mx.array) -> mx.array:
    """Natural logarithms of the probabilities, evaluated: float32 `[rows, vocab]` to the same."""
    found = logits - (mx.logsumexp(logits, axis=-1, keepdims=True) if is_gpu() else mx.array(_sums(logits))[:, None])
    mx.eval(found)
    return found


def _sums(logits: mx.array) -> np.ndarray:
    """Logarithms of the sums of exponentials, float32 `[rows]`: a row at a time, which stays in the caches."""
    rows = np.array(logits, copy=False)
    sums, room = np.empty(len(rows), np.float32), np.empty(rows.shape[1], np.float32)
    for number, row in enumerate(rows):
        most = row.max()
        np.exp(np.subtract(row, most, out=room), out=room)
        sums[number] = most + np.log(room.sum())
    return sums


def kl_divergence(expected: mx.array, found: mx.array) -> mx.array:
    """In nats, of two sets of log-probabilities, float32 `[rows, vocab]`: `[rows]`. Tokens that cannot be add nothing."""
    if is_gpu():
        probabilities = mx.exp(expected)
        return mx.where(probabilities > 0, probabilities * (expected - found), 0).sum(-1)
    pairs = zip(np.array(expected, copy=False), np.array(found, copy=False), strict=True)
    with np.errstate(invalid="ignore"):
        return mx.array([_divergence(*pair) for pair in pairs], mx.float32)


def _divergence(expected: np.ndarray, found: np.ndarray) -> float:
    probabilities = np.exp(expected)
    terms = (expected - found) * probabilities
    terms[probabilities == 0] = 0
    return float(terms.sum())
