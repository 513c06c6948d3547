"""Two groups of 16 numbers under one scale and one bias.

MLX's smallest affine group has 32 numbers. Rounding both halves to evenly spaced codes between their extremes would change all 32. The
numbers of each half already lie on a lattice, so a scale that divides the step of one half keeps that half exactly, and only the other
one is rounded: half the error (measured on Q6_K in 8 bits). Computed by MLX, which has a GPU for it where this matters.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from .kquants import Groups

_TRIED = 3
"""Scales tried for each half: the finest that reaches from the lowest number to the highest, and the next coarser ones, of which one may
divide the step of the other half as well."""


def share(groups: Groups, bits: int) -> Groups:
    """From groups of 16 to groups of 32 with codes of `bits` bits, each with the scale that fits best, rounded to float16."""
    steps = mx.abs(mx.array(groups.scales).reshape(-1, 2))
    offsets = mx.array(groups.offsets).reshape(-1, 2)
    codes = mx.array(groups.codes).reshape(-1, 2, 16).astype(mx.float32)
    numbers = mx.array(groups.scales).reshape(-1, 2, 1) * codes + offsets[..., None]
    numbers = numbers.reshape(-1, 32)
    lowest, most = numbers.min(axis=-1), 2**bits - 1
    least = mx.full(lowest.shape, mx.inf)
    found = (mx.zeros_like(numbers), mx.zeros_like(lowest), lowest)
    for scale, bias in _candidates(steps, offsets, lowest, numbers.max(axis=-1), most):
        coded = mx.clip(mx.round((numbers - bias[:, None]) / scale[:, None]), 0, most)
        error = mx.square(coded * scale[:, None] + bias[:, None] - numbers).sum(axis=-1)
        better = error < least
        least = mx.where(better, error, least)
        found = (mx.where(better[:, None], coded, found[0]), mx.where(better, scale, found[1]), mx.where(better, bias, found[2]))
        mx.eval(least, found)  # so that what one candidate took is free for the next
    rows = len(groups.codes)
    shared = [np.array(part).reshape(rows, -1) for part in (found[0].astype(mx.uint8), *found[1:])]
    return Groups(shared[0].reshape(rows, -1, 32), shared[1], shared[2])


def _candidates(steps: mx.array, offsets: mx.array, lowest: mx.array, highest: mx.array, most: int) -> Iterator[tuple[mx.array, mx.array]]:
    """Scales and biases, each `[groups]`. A scale that is no number fits nothing: its error is NaN, which is below nothing."""
    yield _stored(mx.maximum((highest - lowest) / most, 2.0**-24)), _stored(lowest)
    for half in range(2):
        step, zero = steps[:, half], offsets[:, half]
        parts = mx.floor((most - 1) * step / (highest - lowest))
        for fewer in range(_TRIED):
            divisor = parts - fewer
            scale = _stored(mx.where(divisor >= 1, step / divisor, mx.nan))
            yield scale, _stored(zero + mx.floor((lowest - zero) / scale) * scale)


def _stored(numbers: mx.array) -> mx.array:
    return numbers.astype(mx.float16).astype(mx.float32)
