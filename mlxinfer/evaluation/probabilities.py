"""Log-probabilities of whole vocabularies, and their KL divergence.

On a CPU, NumPy computes them in a quarter of MLX's time. Its sums of 262,144 exponentials are off by 3e-7 in the logarithm, MLX's by 7e-5.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..util.device import is_gpu


def logprobs_of(logits: mx.array) -> mx.array:
    """Return evaluated log-probabilities (natural): float32 `[rows, vocab]` to the same."""
    found = logits - (mx.logsumexp(logits, axis=-1, keepdims=True) if is_gpu() else mx.array(_sums(logits))[:, None])
    mx.eval(found)
    return found


def _sums(logits: mx.array) -> np.ndarray:
    """Return logarithms of the sums of exponentials, float32 `[rows]`, one row at a time so that it stays in the CPU's caches."""
    rows = np.array(logits, copy=False)
    sums, room = np.empty(len(rows), np.float32), np.empty(rows.shape[1], np.float32)
    for number, row in enumerate(rows):
        most = row.max()
        np.exp(np.subtract(row, most, out=room), out=room)
        sums[number] = most + np.log(room.sum())
    return sums


def kl_divergence(expected: mx.array, found: mx.array) -> mx.array:
    """Return the KL divergence in nats, float32 `[rows]`, of log-probabilities float32 `[rows, vocab]`. Impossible tokens add nothing."""
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
