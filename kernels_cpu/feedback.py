"""Codes of a matrix, one column after another, each corrected for the errors of those before it (see src/encode/feedback.h)."""

from __future__ import annotations

import numpy as np

from .native import in_use, native

MOST_COLUMNS = 128
"""How many columns `feed_back` takes at once."""


def can_feed_back() -> bool:
    """Whether `feed_back` can be called: a module that was built before it goes on to serve."""
    return in_use() and hasattr(native, "feed_back")


def feed_back(
    plain: np.ndarray, target: np.ndarray, factor: np.ndarray, scales: np.ndarray, biases: np.ndarray, group_of: np.ndarray, bits: int
) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint8 and errors float32 (plain minus decoded) of at most `MOST_COLUMNS` columns, `[columns, rows]` each.

    `plain` and `target` float32 `[columns, rows]`: the numbers, and what they became through the errors of columns before these. `factor`
    float32 `[columns, columns]`: row c weighs the errors of columns 0 to c - 1 in column c. `scales` and `biases` float32
    `[groups, rows]`, none of the scales zero; `group_of` int32 `[columns]`. Raises ValueError for shapes that do not fit.
    """
    codes, errors = np.empty(plain.shape, np.uint8), np.empty(plain.shape, np.float32)
    native.feed_back(plain, target, factor, scales, biases, group_of, bits, codes, errors)
    return codes, errors
