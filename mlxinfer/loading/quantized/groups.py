"""Converts integer codes with scales and zero points, `(code - zero) * scale`, to MLX's affine format or plain numbers."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ...nn.weights import Dense, Format, Matrix, Quantized
from ..formats import AFFINE_GROUPS

BITS = (2, 3, 4, 8)
"""Bits per code that MLX supports too."""


def group_in_mlx(columns: int, groups: int) -> int | None:
    """MLX's largest group size that divides each of the `groups` in a row of `columns`, or None."""
    size = columns // groups
    return next((g for g in sorted(AFFINE_GROUPS, reverse=True) if size % g == 0), None) if size * groups == columns else None


def affine(words: np.ndarray, scales: np.ndarray, zeros: np.ndarray, form: Format) -> Quantized:
    """Pack `words` uint32 `[out, in * bits / 32]` (MLX's packing) with `scales` and `zeros` `[out, groups]`.

    A group is as large as those of `form`, or a multiple. Scales and biases are float32, so a 16-bit scale times an 8-bit zero point is
    exact.
    """
    columns = words.shape[-1] * 32 // form.bits
    scales = scales.astype(np.float32)
    repeats = columns // form.group_size // scales.shape[-1]
    scales, biases = (np.repeat(a, repeats, axis=-1) for a in (scales, -scales * zeros.astype(np.float32)))
    return Quantized(mx.array(words), mx.array(scales), mx.array(biases), form)


def dense(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, group_of: np.ndarray) -> Matrix:
    """Unpack to float32. `codes` `[out, in]`, `scales` and `zeros` `[out, groups]`, `group_of` `[in]` the group of each column."""
    order, of_code = mx.array(group_of), mx.array(codes)
    zero, scale = (mx.array(a.astype(np.float32)) for a in (zeros, scales))
    return Dense((of_code.astype(mx.float32) - zero[:, order]) * scale[:, order])


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpack words uint32 `[..., n]` to codes uint8 `[..., n * 32 / bits]`: a bit stream from the low bits up."""
    words = np.ascontiguousarray(words)
    if bits == 8:
        return words.view(np.uint8)
    if bits in (2, 4):
        by_byte = words.view(np.uint8)[..., None] >> np.arange(0, 8, bits, dtype=np.uint8)
        codes: np.ndarray = (by_byte & np.uint8(2**bits - 1)).reshape(*words.shape[:-1], -1)
        return codes
    three = words.reshape(*words.shape[:-1], -1, bits)
    stream = np.unpackbits(three.view(np.uint8), axis=-1, bitorder="little").reshape(*words.shape[:-1], -1, bits)
    return np.packbits(stream, axis=-1, bitorder="little")[..., 0]
