"""What a full page becomes: the quantizer of keys and values and its inverse, in plain MLX. Every kernel has to agree with it.

Keys share a scale per channel over the 64 tokens of a page, since it is in a few channels that they are large; values share one per token
in groups along the head. A group's values lie between `bias` and `bias + scale * (2^bits - 1)`, both float16, rounded so that they enclose
all of them; a value is `bias + scale * code`, computed in float32. (Keys per channel, values per token: KIVI, arXiv 2402.02750.)

Codes are a dense bit stream along the last axis, the lowest bits first, each row padded to whole uint32.
"""

from __future__ import annotations

import mlx.core as mx

from .base import PAGE, AttentionSpec
from .format import KVFormat, v_group

_LARGEST = 65504.0
_LEAST_SCALE = 2.0**-24
"""The largest float16, and the smallest: a constant group must not divide by zero."""

Shape = tuple[int, ...]


def page_arrays(spec: AttentionSpec, form: KVFormat, dtype: mx.Dtype) -> list[tuple[Shape, mx.Dtype]]:
    """Shape and dtype of what one page of one KV head is kept in: the arrays of keys, then those of values."""
    keys, values = spec.key_dim, spec.value_dim
    found: list[tuple[Shape, mx.Dtype]] = [((keys, PAGE), dtype)]
    if form.k_bits < 16:
        found = [((keys, 2 * form.k_bits), mx.uint32), ((2, keys), mx.float16)]
    if form.v_bits == 16:
        return [*found, ((PAGE, values), dtype)]
    return [*found, ((PAGE, -(-values * form.v_bits // 32)), mx.uint32), ((2, PAGE, values // v_group(values)), mx.float16)]


def seal_keys(x: mx.array, bits: int) -> list[mx.array]:
    """Keys `[Hkv, n, 64, D]` of n pages to codes `[Hkv, n, D, 2 * bits]` and scales `[Hkv, n, 2, D]` (scale, bias); at 16 bits to
    `[Hkv, n, D, 64]`."""
    channels = x.swapaxes(-1, -2)
    if bits == 16:
        return [channels]
    codes, scale, bias = _quantized(channels, bits)
    return [_packed(codes, bits), mx.stack([scale, bias], axis=2)]


def seal_values(x: mx.array, bits: int) -> list[mx.array]:
    """Values `[Hkv, n, 64, D]` to codes `[Hkv, n, 64, D * bits / 32 rounded up]` and scales `[Hkv, n, 2, 64, D / group]`; at 16 bits they
    stay as they are."""
    if bits == 16:
        return [x]
    groups = x.reshape(*x.shape[:-1], -1, v_group(x.shape[-1]))
    codes, scale, bias = _quantized(groups, bits)
    return [_packed(codes.reshape(x.shape), bits), mx.stack([scale, bias], axis=2)]


def unseal_keys(arrays: list[mx.array], bits: int, dtype: mx.Dtype) -> mx.array:
    """`[Hkv, n, 64, D]`, a transposed view."""
    if bits == 16:
        return arrays[0].swapaxes(-1, -2)
    codes, scales = arrays
    return _values(_unpacked(codes, bits, PAGE), scales, dtype).swapaxes(-1, -2)


def unseal_values(arrays: list[mx.array], bits: int, dim: int, dtype: mx.Dtype) -> mx.array:
    """`[Hkv, n, 64, dim]`."""
    if bits == 16:
        return arrays[0]
    codes, scales = arrays
    unpacked = _unpacked(codes, bits, dim).reshape(*codes.shape[:-1], -1, v_group(dim))
    return _values(unpacked, scales, dtype).reshape(*codes.shape[:-1], dim)


def _values(codes: mx.array, scales: mx.array, dtype: mx.Dtype) -> mx.array:
    """Of codes `[Hkv, n, ..., group]` with scales `[Hkv, n, 2, ...]`."""
    scale, bias = (scales[:, :, i, ..., None].astype(mx.float32) for i in (0, 1))
    return (bias + scale * codes.astype(mx.float32)).astype(dtype)


def _quantized(x: mx.array, bits: int) -> tuple[mx.array, mx.array, mx.array]:
    """uint32 codes, and the float16 scale and bias of each group along the last axis."""
    levels = 2**bits - 1
    x = x.astype(mx.float32)
    bias = _rounded_down(mx.clip(x.min(axis=-1), -_LARGEST, _LARGEST))
    span = (x.max(axis=-1) - bias.astype(mx.float32)) / levels
    scale = -_rounded_down(-mx.clip(span, _LEAST_SCALE, _LARGEST))
    steps = (x - bias[..., None].astype(mx.float32)) / scale[..., None].astype(mx.float32)
    codes = mx.clip(mx.round(steps), 0, levels)
    return mx.where(mx.isfinite(codes), codes, 0).astype(mx.uint32), scale, bias


def _rounded_down(x: mx.array) -> mx.array:
    """The largest float16 that is not above x, which lies between the largest ones."""
    near = x.astype(mx.float16)
    bits = near.view(mx.uint16)
    below = mx.where(near > 0, bits - 1, bits + 1)
    below = mx.where(near == 0, mx.array(0x8001, mx.uint16), below)
    return mx.where(near.astype(mx.float32) > x, below, bits).view(mx.float16)


def _packed(codes: mx.array, bits: int) -> mx.array:
    """Codes `[..., n]`, n divisible by 8: eight of them are `bits` bytes."""
    rows = codes.shape[:-1]
    shifts = mx.arange(0, 8 * bits, bits, dtype=mx.uint64)
    eights = (codes.reshape(*rows, -1, 8).astype(mx.uint64) << shifts).sum(axis=-1, keepdims=True)
    stream = eights.view(mx.uint8)[..., :bits].reshape(*rows, -1)
    padding = -stream.shape[-1] % 4
    if padding:
        stream = mx.concatenate([stream, mx.zeros((*rows, padding), mx.uint8)], axis=-1)
    return stream.view(mx.uint32)


def _unpacked(words: mx.array, bits: int, count: int) -> mx.array:
    """uint8 `[..., count]`. A code lies in one byte of the stream or in two that follow each other."""
    rows = words.shape[:-1]
    stream = words.view(mx.uint8)[..., : count * bits // 8].reshape(*rows, -1, bits)
    codes = []
    for start in range(0, 8 * bits, bits):
        byte, shift = divmod(start, 8)
        code = stream[..., byte] >> shift
        if shift + bits > 8:
            code = code | stream[..., byte + 1] << (8 - shift)
        codes.append(code & (2**bits - 1))
    return mx.stack(codes, axis=-1).reshape(*rows, count)
