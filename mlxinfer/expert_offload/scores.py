"""Scores that decide which experts stay resident: recency and frequency in one number."""

from __future__ import annotations

import numpy as np

HALF_LIFE = 64.0
"""Tokens after which a use of an expert counts half: `python -m benchmarks expert-eviction` compares values."""
_LARGEST_WEIGHT = 1e100


class ExpertScores:
    """LRFU (Lee et al., "LRFU: A Spectrum of Policies that Subsumes the Least Recently Used and Least Frequently Used Policies", 2001).

    Each use adds a weight to an expert's score, and the weight doubles in `half_life` tokens. An infinite half-life counts uses (LFU); one
    far below a token orders experts by their last use (LRU). Scores of experts that are not resident are kept, unlike in the paper.
    """

    def __init__(self, experts: int, half_life: float = HALF_LIFE) -> None:
        self.values = np.zeros(experts)
        """Score of each expert, float64 `[experts]`; higher is worth more."""
        self._weight, self._growth = 1.0, 2.0 ** (1 / half_life)
        self._most_rows = half_life

    def add(self, chosen: np.ndarray, distinct: np.ndarray) -> None:
        """Count the experts that the rows of a step chose, `[..., k]`, `distinct` once each.

        Rows of one step are equally recent. Together they weigh as much as a half-life of tokens at most.
        """
        rows = chosen.size // chosen.shape[-1]
        if rows == 1:
            self.values[distinct] += self._weight
        else:
            share = min(rows, self._most_rows) / rows
            self.values += np.bincount(chosen.reshape(-1), minlength=len(self.values)) * (self._weight * share)
        self._weight *= self._growth ** min(rows, self._most_rows)
        if self._weight > _LARGEST_WEIGHT:
            self.values /= self._weight
            self._weight = 1.0
