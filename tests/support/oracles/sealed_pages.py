"""Sealed pages in plain numpy, bit for bit as every kernel has to make and read them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]


def quantize(x: Array, bits: int, inset: float = 0.0) -> tuple[Array, Array, Array]:
    """Groups along the last axis of finite `x`: codes, and scale and bias in float16. See `mlxinfer/cache/kv_quantization.py`."""
    x = x.astype(np.float32)
    levels = np.float32(2**bits - 1)
    lowest, highest = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    lowest, highest = np.clip(lowest, -65504, 65504), np.clip(highest, -65504, 65504)
    margin = (highest - lowest) * np.float32(inset)
    bias = _to_half(lowest + margin, -np.inf)
    wanted = np.maximum((highest - margin - bias.astype(np.float32)) / levels, np.float32(2.0**-24))
    scale = _to_half(np.minimum(wanted, 65504), np.inf)
    codes = np.clip(np.rint((x - bias.astype(np.float32)) / scale.astype(np.float32)), 0, levels).astype(np.uint32)
    return codes, scale[..., 0], bias[..., 0]


def value_inset(bits: int) -> float:
    """Of the range of values, which their codes leave out at either end."""
    return 0.25 / 2**bits


def _to_half(x: Array, towards: float) -> Array:
    half = x.astype(np.float16)
    back = half.astype(np.float32)
    wrong = back > x if towards < 0 else back < x
    return np.where(wrong, np.nextafter(half, np.float16(towards)), half)


def pack(codes: Array, bits: int) -> Array:
    """Rows of codes to rows of words: a little-endian bit stream."""
    stream = (codes[..., None] >> np.arange(bits, dtype=np.uint32)) & 1
    stream = stream.reshape(*codes.shape[:-1], -1).astype(np.uint8)
    stream = np.pad(stream, [(0, 0)] * (stream.ndim - 1) + [(0, -stream.shape[-1] % 32)])
    return np.packbits(stream, axis=-1, bitorder="little").view(np.uint32)


def seal_keys(pages: Array, bits: int) -> tuple[list[Array], Array]:
    """`[..., 64, D]` to codes and scales, and to what they stand for, in float64."""
    codes, scale, bias = quantize(np.swapaxes(pages, -1, -2), bits)
    meant = bias[..., None].astype(np.float64) + scale[..., None].astype(np.float64) * codes
    return [pack(codes, bits), np.stack([scale, bias], axis=-2)], np.swapaxes(meant, -1, -2)


def seal_values(pages: Array, bits: int, group: int) -> tuple[list[Array], Array]:
    grouped = pages.reshape(*pages.shape[:-1], -1, group)
    codes, scale, bias = quantize(grouped, bits, value_inset(bits))
    meant = bias[..., None].astype(np.float64) + scale[..., None].astype(np.float64) * codes
    return [pack(codes.reshape(pages.shape), bits), np.stack([scale, bias], axis=-3)], meant.reshape(pages.shape)


def to_float(x: mx.array) -> Array:
    return np.array(x.astype(mx.float32))
