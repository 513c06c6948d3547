"""Codes and scales of MLX's floating-point formats mxfp4, mxfp8 and nvfp4, with the best scale for each group.

`mx.quantize` derives a group's scale from its largest number alone. Neighbouring scales often lose less. Numbers that were in such a format
before are found again exactly, whatever their largest one.
"""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx

from ...loading.weights import quantize
from ...nn.weights import Format, Quantized

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the three low bits of a 4-bit code; the fourth bit is the sign."""
_BETWEEN = tuple((a + b) / 2 for a, b in pairwise(_MAGNITUDES))
_POWERS = (0, -1, 1, -2, 2)
"""Changes tried for a scale's exponent."""
_STEPS = (0, -1, 1, -2, 2, -3, 3, -4, 4, 5, 6, -8, 13, -16)
"""Changes tried for the code of an nvfp4 scale; 8 steps are a factor of two."""
_PIECE = 1 << 21


def fit_floats(weight: mx.array, form: Format, importance: mx.array | None = None) -> Quantized:
    """Quantize `[rows, in]` with those of the tried scales that minimise `sum(importance * (weight - decoded)^2)` in each group.

    `importance` is as in `affine.fit`.
    """
    rows, columns = weight.shape
    weights = mx.ones((1, columns)) if importance is None else importance.astype(mx.float32).reshape(-1, columns)
    step = max(_PIECE // columns, 1)
    parts = []
    for first in range(0, rows, step):
        here = slice(first, first + step)
        parts.append(_fit_rows(weight[here], form, weights if len(weights) == 1 else weights[here]))
        mx.eval(parts[-1])
    codes, scales = (mx.concatenate(list(each)) for each in zip(*parts, strict=True))
    return Quantized(codes, scales, None, form)


def _fit_rows(weight: mx.array, form: Format, importance: mx.array) -> tuple[mx.array, mx.array]:
    plain = quantize(weight, form)
    shape = (weight.shape[0], -1, form.group_size)
    x, weights = weight.astype(mx.float32).reshape(shape), importance.reshape(importance.shape[0], -1, form.group_size)
    best, codes = plain.scales, _unpacked(plain, form).reshape(shape)
    least = _error(x, weights, plain.dequantize(mx.float32).reshape(shape))
    for change in _STEPS if form.mode == "nvfp4" else _POWERS:
        changed = plain.scales.astype(mx.int32) + change
        scales = mx.clip(changed, 1, 0x7E if form.mode == "nvfp4" else 0xFE).astype(mx.uint8)
        factor = _scale_value(scales, form)
        tried = _codes(x, factor, form)
        error = _error(x, weights, _decoded_numbers(tried, form) * factor[..., None])
        better = error < least
        least, best = mx.where(better, error, least), mx.where(better, scales, best)
        codes = mx.where(better[..., None], tried, codes)
    return _packed(codes.reshape(weight.shape), form.bits), best


def _error(x: mx.array, importance: mx.array, decoded: mx.array) -> mx.array:
    return (importance * mx.square(decoded - x)).sum(-1)


def _scale_value(scales: mx.array, form: Format) -> mx.array:
    """Return the value of a scale: a power of two, or an 8-bit float for nvfp4."""
    if form.mode == "nvfp4":
        found: mx.array = mx.from_fp8(scales, mx.float32)
        return found
    return (scales.astype(mx.uint32) << 23).view(mx.float32)


def _codes(x: mx.array, factor: mx.array, form: Format) -> mx.array:
    """Return the nearest codes, uint8."""
    scaled = x / mx.where(factor == 0, 1, factor)[..., None]
    if form.bits == 8:
        return mx.to_fp8(mx.clip(scaled, -448, 448))
    size = mx.abs(scaled)
    code = sum(((size > edge) if number % 2 == 0 else (size >= edge)).astype(mx.uint8) for number, edge in enumerate(_BETWEEN))
    return mx.where(scaled < 0, code + 8, code).astype(mx.uint8)  # type: ignore[union-attr]


def _decoded_numbers(codes: mx.array, form: Format) -> mx.array:
    if form.bits == 8:
        return mx.from_fp8(codes, mx.float32)
    found: mx.array = mx.array([*_MAGNITUDES, *(-each for each in _MAGNITUDES)])[codes]
    return found


def _unpacked(matrix: Quantized, form: Format) -> mx.array:
    """Return the uint8 codes of a packed matrix."""
    lanes = 32 // form.bits
    shifts = mx.arange(lanes, dtype=mx.uint32) * form.bits
    codes: mx.array = ((matrix.weight[..., None] >> shifts) & (2**form.bits - 1)).astype(mx.uint8).reshape(matrix.shape)
    return codes


def _packed(codes: mx.array, bits: int) -> mx.array:
    lanes = 32 // bits
    shifts = mx.arange(lanes, dtype=mx.uint32) * bits
    return (codes.reshape(*codes.shape[:-1], -1, lanes).astype(mx.uint32) << shifts).sum(-1).astype(mx.uint32)
