"""Bit widths of sealed pages, and the values that share a scale."""

from __future__ import annotations

import mlx.core as mx

BITS = (16, 8, 6, 5, 4, 3, 2)
"""16 means the model's compute dtype."""


def v_group(dim: int) -> int:
    """Return the number of channels of V that share a scale: the largest divisor of the head size that is at most 64 and a multiple of
    8."""
    return max(n for n in range(8, 65, 8) if dim % n == 0)


def element_bits(bits: int, dtype: mx.Dtype) -> int:
    """Return the bits of a value in memory; 16 means that it is stored in `dtype`."""
    return int(8 * dtype.size) if bits == 16 else bits
