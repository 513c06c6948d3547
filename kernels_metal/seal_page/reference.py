"""Dequantizes sealed pages, in plain MLX and float32."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..formats import v_group

PAGE = 64


def unseal_keys(arrays: Sequence[mx.array], bits: int) -> mx.array:
    """Codes `[..., D, 2 * bits]` and scales `[..., 2, D]`, or at 16 bits `[..., D, 64]`, to `[..., 64, D]`."""
    if bits == 16:
        return arrays[0].astype(mx.float32).swapaxes(-1, -2)
    codes, scales = arrays
    scale, bias = (scales[..., i, :, None].astype(mx.float32) for i in (0, 1))
    return (bias + scale * unpacked(codes, bits, PAGE)).swapaxes(-1, -2)


def unseal_values(arrays: Sequence[mx.array], bits: int, dim: int) -> mx.array:
    """Codes `[..., 64, words]` and scales `[..., 2, 64, groups]`, or at 16 bits `[..., 64, D]`, to `[..., 64, D]`."""
    if bits == 16:
        return arrays[0].astype(mx.float32)
    codes, scales = arrays
    numbers = mx.unflatten(unpacked(codes, bits, dim), -1, (-1, v_group(dim)))
    scale, bias = (scales[..., i, :, :, None].astype(mx.float32) for i in (0, 1))
    return mx.flatten(bias + scale * numbers, -2)


def unpacked(codes: mx.array, bits: int, count: int) -> mx.array:
    """The first `count` codes of each row of a bit stream, as float32."""
    first = mx.arange(count, dtype=mx.uint32) * bits
    shift = first % 32
    low = mx.take(codes, first // 32, axis=-1) >> shift
    next_word = mx.minimum((first + bits - 1) // 32, codes.shape[-1] - 1)
    high = mx.where(shift + bits > 32, mx.take(codes, next_word, axis=-1) << ((32 - shift) % 32), 0)
    found: mx.array = (low | high) & (2**bits - 1)
    return found.astype(mx.float32)
