"""How far next-token probabilities move when something is rounded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Loss:
    """Over `tokens` positions: mean, 99th percentile and maximum of the KL divergence in nats, how often the most probable token is the
    same, and the factor by which the text's perplexity grows."""

    tokens: int
    mean_kl: float
    high_kl: float
    highest_kl: float
    same_top: float
    perplexity: float


class Comparison:
    """Accumulates logits `[rows, vocab]` of the same tokens: exact ones and others."""

    def __init__(self) -> None:
        self._kl: list[Rows] = []
        self._same: list[NDArray[np.bool_]] = []
        self._surprise: list[Rows] = []

    def add(self, exact: Rows, other: Rows, following: list[int]) -> None:
        """`following` are the tokens after each row; one fewer at the end of the text."""
        p, q = log_softmax(exact), log_softmax(other)
        self._kl.append((np.exp(p) * (p - q)).sum(-1))
        self._same.append(p.argmax(-1) == q.argmax(-1))
        rows = np.arange(len(following))
        self._surprise.append(p[rows, following] - q[rows, following])

    def loss(self, skip: int = 0) -> Loss:
        """Without the first `skip` positions."""
        kl, same, surprise = np.concatenate(self._kl)[skip:], np.concatenate(self._same)[skip:], np.concatenate(self._surprise)[skip:]
        high = float(np.percentile(kl.astype(np.float64), 99))
        return Loss(len(kl), float(kl.mean()), high, float(kl.max()), float(same.mean()), float(np.exp(surprise.mean())))


def log_softmax(logits: Rows) -> Rows:
    shifted = logits - logits.max(-1, keepdims=True)
    sums: NDArray[np.float64] = np.exp(shifted).sum(-1, keepdims=True, dtype=np.float64)
    found: Rows = shifted - np.log(sums).astype(np.float32)
    return found
