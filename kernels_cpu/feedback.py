"""Codes of a matrix, column by column; each column compensates the errors of earlier columns (see src/encode/feedback.h)."""

from __future__ import annotations

import numpy as np

from .native import in_use, native

MOST_COLUMNS = 128
"""Columns that one call of `feed_back` takes at most."""


def can_feed_back() -> bool:
    """True if `feed_back` can be called; an older module lacks it."""
    return in_use() and hasattr(native, "feed_back")


def feed_back(
    plain: np.ndarray, target: np.ndarray, factor: np.ndarray, scales: np.ndarray, biases: np.ndarray, group_of: np.ndarray, bits: int
) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint8 and errors float32 (plain minus decoded) of at most `MOST_COLUMNS` columns, `[columns, rows]` each.

    `plain` and `target` float32 `[columns, rows]`: the original numbers, and the numbers corrected for errors of earlier columns. `factor`
    float32 `[columns, columns]`: row c weighs the errors of columns 0 to c - 1 in column c. `scales` and `biases` float32
    `[groups, rows]`, all scales nonzero; `group_of` int32 `[columns]`. Raises ValueError for shapes that do not fit.
    """
    codes, errors = np.empty(plain.shape, np.uint8), np.empty(plain.shape, np.float32)
    native.feed_back(plain, target, factor, scales, biases, group_of, bits, codes, errors)
    return codes, errors
