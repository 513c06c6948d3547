"""Quantizer of sealed pages and its inverse in plain MLX, the reference of all kernels.

Keys share a scale per channel over the 64 tokens of a page, because a few channels are much larger than the others. Values share a scale
per token, in groups along the head (KIVI, arXiv:2402.02750). Codes span `bias` to `bias + scale * (2^bits - 1)`, both float16. For keys
this is the group's range, rounded outwards. For values it is narrower by a quarter of a step at each end: the steps are smaller, at little
cost to the extremes. Keys lose by this in measurements, because attention depends on their extremes. A value is `bias + scale * code` in
float32.

Codes are a dense bit stream along the last axis, lowest bits first, each row padded to whole uint32 words.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from .. import kernels_cpu
from ..kernels_metal.formats import v_group
from ..util.dataclass import dataclass
from .base import PAGE, AttentionSpec
from .kv_format import KVFormat

_LARGEST = 65504.0
_LEAST_SCALE = 2.0**-24
"""Largest and smallest float16; the smallest prevents division by zero for constant groups."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sealing:
    """Quantizer of full pages: this module's or a kernel's."""

    keys: Callable[[mx.array, int], list[mx.array]]
    """`seal_keys`, or an equivalent."""
    values: Callable[[mx.array, int], list[mx.array]]
    """`seal_values`, or an equivalent."""


def keys_alone(spec: AttentionSpec) -> bool:
    """Return True if pages have no values, because values are part of the keys and no kernel reads them separately."""
    return spec.values_in_keys and not kernels_cpu.in_use()


def page_arrays(spec: AttentionSpec, form: KVFormat, dtype: mx.Dtype) -> list[tuple[Shape, mx.Dtype]]:
    """Return (shape, dtype) of the arrays of one page and KV head: of keys, then of values if stored."""
    keys, values = spec.key_dim, spec.value_dim
    found: list[tuple[Shape, mx.Dtype]] = [((keys, PAGE), dtype)]
    if form.k_bits < 16:
        found = [((keys, 2 * form.k_bits), mx.uint32), ((2, keys), mx.float16)]
    if keys_alone(spec):
        return found
    if form.v_bits == 16:
        return [*found, ((PAGE, values), dtype)]
    return [*found, ((PAGE, -(-values * form.v_bits // 32)), mx.uint32), ((2, PAGE, values // v_group(values)), mx.float16)]


def seal_keys(x: mx.array, bits: int) -> list[mx.array]:
    """Quantize keys `[Hkv, n, 64, D]` of n pages to codes `[Hkv, n, D, 2 * bits]` uint32 and scales `[Hkv, n, 2, D]` float16 (scale, bias);
    at 16 bits, transpose to `[Hkv, n, D, 64]`."""
    channels = x.swapaxes(-1, -2)
    if bits == 16:
        return [channels]
    codes, scale, bias = _quantized(channels, bits, inset=0.0)
    return [_packed(codes, bits), mx.stack([scale, bias], axis=2)]


def seal_values(x: mx.array, bits: int) -> list[mx.array]:
    """Quantize values `[Hkv, n, 64, D]` to codes `[Hkv, n, 64, ceil(D * bits / 32)]` uint32 and scales `[Hkv, n, 2, 64, D / group]`
    float16; at 16 bits they stay as they are."""
    if bits == 16:
        return [x]
    codes, scale, bias = _quantized(mx.unflatten(x, -1, _groups(x.shape[-1])), bits, inset=0.25 / 2**bits)
    return [_packed(codes.reshape(x.shape), bits), mx.stack([scale, bias], axis=2)]


def unseal_keys(arrays: list[mx.array], bits: int, dtype: mx.Dtype) -> mx.array:
    """Dequantize keys: `[Hkv, n, 64, D]`, a transposed view."""
    if bits == 16:
        return arrays[0].swapaxes(-1, -2)
    codes, scales = arrays
    return _values(_unpacked(codes, bits, PAGE), scales, dtype).swapaxes(-1, -2)


def unseal_values(arrays: list[mx.array], bits: int, dim: int, dtype: mx.Dtype) -> mx.array:
    """Dequantize values: `[Hkv, n, 64, dim]`."""
    if bits == 16:
        return arrays[0]
    codes, scales = arrays
    unpacked = mx.unflatten(_unpacked(codes, bits, dim), -1, _groups(dim))
    return mx.flatten(_values(unpacked, scales, dtype), -2)


def _groups(dim: int) -> Shape:
    group = v_group(dim)
    return dim // group, group


PLAIN = Sealing(seal_keys, seal_values)


def _values(codes: mx.array, scales: mx.array, dtype: mx.Dtype) -> mx.array:
    """Dequantize codes `[Hkv, n, ..., group]` with scales `[Hkv, n, 2, ...]`."""
    scale, bias = (scales[:, :, i, ..., None].astype(mx.float32) for i in (0, 1))
    return (bias + scale * codes.astype(mx.float32)).astype(dtype)


def _quantized(x: mx.array, bits: int, inset: float) -> tuple[mx.array, mx.array, mx.array]:
    """Return uint32 codes, and float16 scale and bias of each group along the last axis.

    `inset` is the fraction of a group's range excluded at each end. It is an exact power of two, so that all implementations yield the same
    codes.
    """
    levels = 2**bits - 1
    x = x.astype(mx.float32)
    least, most = (mx.clip(end, -_LARGEST, _LARGEST) for end in (x.min(axis=-1), x.max(axis=-1)))
    margin = (most - least) * inset
    bias = _rounded_down(least + margin)
    span = (most - margin - bias.astype(mx.float32)) / levels
    scale = -_rounded_down(-mx.clip(span, _LEAST_SCALE, _LARGEST))
    steps = (x - bias[..., None].astype(mx.float32)) / scale[..., None].astype(mx.float32)
    codes = mx.clip(mx.round(steps), 0, levels)
    return mx.where(mx.isfinite(codes), codes, 0).astype(mx.uint32), scale, bias


def _rounded_down(x: mx.array) -> mx.array:
    """Return the largest float16 not above x; x must be in the float16 range."""
    near = x.astype(mx.float16)
    bits = near.view(mx.uint16)
    below = mx.where(near > 0, bits - 1, bits + 1)
    below = mx.where(near == 0, mx.array(0x8001, mx.uint16), below)
    return mx.where(near.astype(mx.float32) > x, below, bits).view(mx.float16)


def _packed(codes: mx.array, bits: int) -> mx.array:
    """Pack codes `[..., n]`, n divisible by 8: eight codes take `bits` bytes."""
    eights = mx.unflatten(codes.astype(mx.uint64), -1, (codes.shape[-1] // 8, 8))
    eights = (eights << mx.arange(0, 8 * bits, bits, dtype=mx.uint64)).sum(axis=-1, keepdims=True)
    stream = mx.flatten(eights.view(mx.uint8)[..., :bits], -2)
    padding = -stream.shape[-1] % 4
    if padding:
        stream = mx.concatenate([stream, mx.zeros((*stream.shape[:-1], padding), mx.uint8)], axis=-1)
    return stream.view(mx.uint32)


def _unpacked(words: mx.array, bits: int, count: int) -> mx.array:
    """Unpack codes to uint8 `[..., count]`. A code lies in one byte of the stream or in two consecutive ones."""
    stream = words.view(mx.uint8)[..., : count * bits // 8]
    stream = mx.unflatten(stream, -1, (count // 8, bits))
    codes = []
    for start in range(0, 8 * bits, bits):
        byte, shift = divmod(start, 8)
        code = stream[..., byte] >> shift
        if shift + bits > 8:
            code = code | stream[..., byte + 1] << (8 - shift)
        codes.append(code & (2**bits - 1))
    return mx.flatten(mx.stack(codes, axis=-1), -2)
