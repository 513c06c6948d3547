"""Splits the blocks of ggml's K-quants into codes, and the scale and offset of every group.

A block has 256 numbers `scale * code + offset` in groups of 32 or 16. Layouts: `ggml-common.h` and `dequantize_row_*` of
https://github.com/ggml-org/ggml.

`share` puts two groups of 16 numbers under one scale and bias, since MLX's smallest affine group has 32 numbers. Rounding both halves to
evenly spaced codes between their extremes would change all 32. The numbers of each half are on a lattice already: a scale that divides
the step of one half keeps that half exactly, and only the other is rounded. This halves the error (measured on Q6_K in 8 bits). MLX
computes it, on a GPU if there is one.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from ...util.dataclass import dataclass
from .bitstream import halves, nibbles


@dataclass(frozen=True, slots=True)
class Groups:
    """The numbers of some rows: `scales * codes + offsets`, exactly in float32."""

    codes: np.ndarray
    """uint8 `[rows, groups, size]`."""
    scales: np.ndarray
    """float32 `[rows, groups]`; may be negative or zero."""
    offsets: np.ndarray
    """float32 `[rows, groups]`."""


def q5_k(blocks: np.ndarray) -> Groups:
    """Q5_K: uint8 `[rows, blocks, 176]`, 5 bits in groups of 32; the highest bits are separate."""
    fifth = _shifted(blocks[..., 16:48], range(8)) & 1
    return _make_groups(_nibble_groups(blocks[..., 48:]) | fifth << 4, 32, *of_32(blocks))


def q6_k(blocks: np.ndarray) -> Groups:
    """Q6_K: uint8 `[rows, blocks, 210]`, 6 bits in groups of 16, centred on 32."""
    low = nibbles(blocks[..., :128].reshape(*blocks.shape[:-1], 2, 64)).reshape(*blocks.shape[:-1], 8, 32)
    high = _shifted(blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 32), range(0, 8, 2)).reshape(low.shape) & 3
    scales = halves(blocks, 208)[..., None] * np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return _make_groups(low | high << 4, 16, scales, -32 * scales)


def q3_k(blocks: np.ndarray) -> Groups:
    """Q3_K: uint8 `[rows, blocks, 110]`, 3 bits in groups of 16, centred on 4; the highest bits are separate."""
    high = _shifted(blocks[..., :32], range(8)) & 1
    scales = halves(blocks, 108)[..., None] * (_six_bits_of_12(blocks[..., 96:108]).astype(np.int8) - 32)
    return _make_groups(_two_bit_groups(blocks[..., 32:96]) | high << 2, 16, scales, -4 * scales)


def q2_k(blocks: np.ndarray) -> Groups:
    """Q2_K: uint8 `[rows, blocks, 84]`, 2 bits in groups of 16."""
    packed = blocks[..., :16]
    scales = halves(blocks, 80)[..., None] * (packed & 0x0F)
    return _make_groups(_two_bit_groups(blocks[..., 16:80]), 16, scales, -halves(blocks, 82)[..., None] * (packed >> 4))


def of_32(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and offsets, float32 `[rows, groups]`, of Q4_K and Q5_K: two float16 numbers, then 6 bits for each scale and offset."""
    low, high = blocks[..., 4:12], blocks[..., 12:16]
    first = low & 63
    last = low >> 6 << 4
    steps = np.concatenate([first[..., :4], (high & 0x0F) | last[..., :4]], axis=-1)
    minima = np.concatenate([first[..., 4:], (high >> 4) | last[..., 4:]], axis=-1)
    return _flat_rows(halves(blocks, 0)[..., None] * steps), _flat_rows(-halves(blocks, 2)[..., None] * minima)


def _make_groups(codes: np.ndarray, size: int, scales: np.ndarray, offsets: np.ndarray) -> Groups:
    return Groups(codes.reshape(len(codes), -1, size), _flat_rows(scales), _flat_rows(offsets))


def _flat_rows(numbers: np.ndarray) -> np.ndarray:
    return np.asarray(numbers.reshape(len(numbers), -1))


def _nibble_groups(packed: np.ndarray) -> np.ndarray:
    """Bytes `[..., 128]` to the codes of eight groups, `[..., 8, 32]`: one group in low halves, the next in high halves."""
    return nibbles(packed.reshape(*packed.shape[:-1], 4, 32)).reshape(*packed.shape[:-1], 8, 32)


def _two_bit_groups(packed: np.ndarray) -> np.ndarray:
    """Bytes `[..., 64]` to 2-bit codes `[..., 8, 32]`: 128 numbers in 32 bytes, from the low bits up."""
    half = _shifted(packed.reshape(*packed.shape[:-1], 2, 32), range(0, 8, 2)) & 3
    return half.reshape(*packed.shape[:-1], 8, 32)


def _shifted(packed: np.ndarray, by: range) -> np.ndarray:
    """Bytes `[..., n]`, shifted right by each number: `[..., len(by), n]`."""
    return np.asarray(packed[..., None, :] >> np.array(by, np.uint8)[:, None])


def _six_bits_of_12(packed: np.ndarray) -> np.ndarray:
    """The 16 scales of Q3_K: low halves in 8 bytes, two bits each in 4 more."""
    low = nibbles(packed[..., :8])
    high = _shifted(packed[..., 8:], range(0, 8, 2)).reshape(low.shape) & 3
    return np.asarray(low | high << 4)


_TRIED = 3
"""Scales tried for each half: the finest that spans its numbers, and the next coarser scales, which may divide the other half's step
too."""


def share(groups: Groups, bits: int) -> Groups:
    """Merge groups of 16 into groups of 32 with codes of `bits` bits, each with its best scale, rounded to float16."""
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
        mx.eval(least, found)  # frees the memory of one candidate for the next
    rows = len(groups.codes)
    shared = [np.array(part).reshape(rows, -1) for part in (found[0].astype(mx.uint8), *found[1:])]
    return Groups(shared[0].reshape(rows, -1, 32), shared[1], shared[2])


def _candidates(steps: mx.array, offsets: mx.array, lowest: mx.array, highest: mx.array, most: int) -> Iterator[tuple[mx.array, mx.array]]:
    """Scales and biases, each `[groups]`. A NaN scale never wins: its error is NaN, which compares as not smaller."""
    yield _as_float16(mx.maximum((highest - lowest) / most, 2.0**-24)), _as_float16(lowest)
    for half in range(2):
        step, zero = steps[:, half], offsets[:, half]
        parts = mx.floor((most - 1) * step / (highest - lowest))
        for fewer in range(_TRIED):
            divisor = parts - fewer
            scale = _as_float16(mx.where(divisor >= 1, step / divisor, mx.nan))
            yield scale, _as_float16(zero + mx.floor((lowest - zero) / scale) * scale)


def _as_float16(numbers: mx.array) -> mx.array:
    return numbers.astype(mx.float16).astype(mx.float32)
