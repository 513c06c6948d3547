"""The quantizer of sealed pages once more, in NumPy, to check every other one with."""

from __future__ import annotations

import numpy as np

from mlxinfer.cache.format import v_group


def quantized(x: np.ndarray, bits: int, inset: float = 0.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scale and bias of the groups along the last axis of finite `x`."""
    x, levels = x.astype(np.float32), np.float32(2**bits - 1)
    least, most = np.clip(x.min(-1), -65504, 65504), np.clip(x.max(-1), -65504, 65504)
    margin = (most - least) * np.float32(inset)
    bias = down(least + margin)
    with np.errstate(over="ignore"):
        span = (most - margin - bias.astype(np.float32)) / levels
        scale = -down(-np.clip(span, np.float32(2**-24), 65504))
        steps = (x - bias.astype(np.float32)[..., None]) / scale.astype(np.float32)[..., None]
    return np.clip(np.round(steps), 0, levels).astype(np.uint32), scale, bias


def value_inset(bits: int) -> float:
    """Of the range of values, which their codes leave out at either end."""
    return 0.25 / 2**bits


def down(x: np.ndarray) -> np.ndarray:
    """The next float16 at or below."""
    near = x.astype(np.float16)
    with np.errstate(over="ignore"):
        below = np.nextafter(near, np.float16(-np.inf))
    return np.where(near.astype(np.float32) > x, below, near)


def restored(x: np.ndarray, bits: int, inset: float = 0.0) -> np.ndarray:
    """What is left of groups along the last axis."""
    if bits == 16:
        return x
    codes, scale, bias = quantized(x, bits, inset)
    return bias.astype(np.float32)[..., None] + scale.astype(np.float32)[..., None] * codes.astype(np.float32)


def restored_keys(pages: np.ndarray, bits: int) -> np.ndarray:
    """`[..., 64, D]`."""
    return restored(pages.swapaxes(-1, -2), bits).swapaxes(-1, -2)


def restored_values(pages: np.ndarray, bits: int) -> np.ndarray:
    group = v_group(pages.shape[-1]) if bits < 16 else 1
    return restored(pages.reshape(*pages.shape[:-1], -1, group), bits, value_inset(bits)).reshape(pages.shape)


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """A stream of bits along the last axis, the lowest first, in whole uint32."""
    stream = (codes[..., None] >> np.arange(bits, dtype=np.uint32) & 1).reshape(*codes.shape[:-1], -1).astype(np.uint8)
    padding = [(0, 0)] * (stream.ndim - 1) + [(0, -stream.shape[-1] % 32)]
    return np.packbits(np.pad(stream, padding), axis=-1, bitorder="little").view("<u4")
