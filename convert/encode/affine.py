"""Finds codes, scales and biases of a matrix in MLX's affine format."""

from __future__ import annotations

from typing import Literal, get_args

import mlx.core as mx
import numpy as np

from ... import kernels_cpu
from ...errors import ConversionError
from ...nn.activations import fused
from ...nn.weights import Format, Quantized
from .float_formats import fit_floats

Encoder = Literal["minmax", "fit", "gptq"]
ENCODERS: tuple[Encoder, ...] = get_args(Encoder)
"""`minmax` spans each group's range, as `mx.quantize` does. `fit` minimises the squared error of the layer's outputs for uncorrelated
inputs, `gptq` for correlated ones."""

_SHRUNKEN = (1.0, 0.94, 0.88, 0.82, 0.75, 0.66)
"""Initial ranges, as shares of the group's own."""
_ROUNDS = 3
_LAST_ROUNDS = 6
"""Rounds for the best start."""
_PIECE = 1 << 21
"""Numbers fitted at once."""
_LEAST = 1e-6
"""Importance of a column that was never used, as a share of the mean."""


def check_encoder(name: str | None) -> Encoder:
    """Return the encoder of this name; None is the default, `fit`. Raises `ConversionError`."""
    if name is not None and name not in ENCODERS:
        raise ConversionError(f"there is no encoder {name!r}, only {', '.join(ENCODERS)}")
    return name or "fit"


def fit(weight: mx.array, form: Format, importance: mx.array | None = None) -> Quantized:
    """Quantize `[rows, in]` with scales and biases that minimise `sum(importance * (weight - decoded)^2)` in each group.

    `importance` is float32 `[in]` or `[rows, in]`, the mean square of each input. The sum is then the expected squared output error for
    uncorrelated inputs. None weights all columns equally. From the group's range and smaller ones, codes and least-squares scale and bias
    alternate. The best stored result wins; the range itself takes part. For formats other than affine, scales near those of `mx.quantize`
    are tried.
    """
    if form.mode != "affine":
        return fit_floats(weight, form, importance)
    codes, scales, biases = fit_parts(weight, form, importance)
    return Quantized(pack_codes(codes, form.bits), scales, biases, form)


def fit_parts(weight: mx.array, form: Format, importance: mx.array | None = None) -> Parts:
    """Fit an affine format as `fit`, and return the codes unpacked."""
    importance = mx.ones((weight.shape[-1],)) if importance is None else importance
    importance = mx.maximum(importance / mx.maximum(mx.mean(importance, axis=-1, keepdims=True), 1e-30), _LEAST)
    found = _native_fit if kernels_cpu.can_fit() else _mlx_fit
    return found(weight, form, importance.reshape(-1, weight.shape[-1]))


Parts = tuple[mx.array, mx.array, mx.array]
"""Codes uint8 `[rows, in]`, scales and biases `[rows, in / group_size]`."""


Pair = tuple[mx.array, mx.array]
"""Scales and biases of groups."""


def _native_fit(weight: mx.array, form: Format, importance: mx.array) -> Parts:
    plain, weights = np.array(weight.astype(mx.float32), copy=False), np.array(importance, copy=False)
    found = kernels_cpu.fit_affine(plain, weights, bits=form.bits, group_size=form.group_size, dtype=weight.dtype)
    codes, scales, biases = map(mx.array, found)
    return codes, scales.astype(weight.dtype), biases.astype(weight.dtype)


def _mlx_fit(weight: mx.array, form: Format, importance: mx.array) -> Parts:
    rows, columns = weight.shape
    shape = (-1, columns // form.group_size, form.group_size)
    step = max(_PIECE // columns, 1)
    pieces = []
    for first in range(0, rows, step):
        weights = importance if importance.shape[0] == 1 else importance[first : first + step]
        pieces.append(_fit_groups(weight[first : first + step].reshape(shape), weights.reshape(shape), form.bits))
        mx.eval(pieces[-1])
    codes, scales, biases = (mx.concatenate(list(parts)) for parts in zip(*pieces, strict=True))
    return codes.reshape(rows, columns), scales, biases


def _fit_groups(weight: mx.array, importance: mx.array, bits: int) -> Parts:
    """Return codes, scales and biases of groups `[rows, groups, size]`."""
    dtype, x, top = weight.dtype, weight.astype(mx.float32), float(2**bits - 1)
    low, high = x.min(-1), x.max(-1)
    middle, half = (high + low) / 2, (high - low) / 2
    total, total_x = mx.broadcast_to(importance, x.shape).sum(-1), (importance * x).sum(-1)
    best = _range_of(low, high, top)
    starts = [best, *((mx.maximum(2 * half * share / top, 1e-8), middle - half * share) for share in _SHRUNKEN)]
    best = best[0].astype(dtype), best[1].astype(dtype)
    least = _error(x, importance, *best, top)

    def judge(pair: Pair) -> None:
        nonlocal best, least
        stored = pair[0].astype(dtype), pair[1].astype(dtype)
        error = _error(x, importance, *stored, top)
        better = (error < least) & (stored[0] != 0)
        least = mx.where(better, error, least)
        best = mx.where(better, stored[0], best[0]), mx.where(better, stored[1], best[1])

    for start in starts:
        pair = start
        for _ in range(_ROUNDS):
            pair = _refined(x, importance, pair, total, total_x, top)
        judge(pair)
    pair = best
    for _ in range(_LAST_ROUNDS):
        pair = _refined(x, importance, pair, total, total_x, top)
        judge(pair)
    return _codes(x, *best, top).astype(mx.uint8), *best


def _range_of(low: mx.array, high: mx.array, top: float) -> Pair:
    """Return scale and bias as `mx.quantize`: the extreme farther from zero, and zero, are exact."""
    from_low = mx.abs(low) > mx.abs(high)
    scale = mx.maximum((high - low) / top, 1e-7)
    scale = mx.where(from_low, scale, -scale)
    edge = mx.where(from_low, low, high)
    steps = mx.round(edge / scale)
    exact = steps != 0
    return mx.where(exact, edge / mx.where(exact, steps, 1), scale), mx.where(exact, edge, 0)


@fused
def _codes(x: mx.array, scale: mx.array, bias: mx.array, top: float) -> mx.array:
    scale, bias = scale.astype(mx.float32)[..., None], bias.astype(mx.float32)[..., None]
    return mx.clip(mx.round((x - bias) / mx.where(scale == 0, 1, scale)), 0, top)


@fused
def _error(x: mx.array, importance: mx.array, scale: mx.array, bias: mx.array, top: float) -> mx.array:
    decoded = _codes(x, scale, bias, top) * scale.astype(mx.float32)[..., None] + bias.astype(mx.float32)[..., None]
    return (importance * mx.square(decoded - x)).sum(-1)


def _refined(x: mx.array, importance: mx.array, pair: Pair, total: mx.array, total_x: mx.array, top: float) -> Pair:
    """Return the weighted least-squares scale and bias for the codes of this pair; the pair itself if all codes are equal."""
    scale, bias = pair
    codes = _codes(x, scale, bias, top)
    weighted = importance * codes
    first, second, product = weighted.sum(-1), (weighted * codes).sum(-1), (weighted * x).sum(-1)
    determinant = total * second - first * first
    solvable = determinant > 1e-6 * total * second
    slope = (total * product - first * total_x) / mx.where(solvable, determinant, 1)
    solvable = solvable & (mx.abs(slope) > 1e-9)
    return mx.where(solvable, slope, scale), mx.where(solvable, (total_x - slope * first) / total, bias)


def pack_codes(codes: mx.array, bits: int) -> mx.array:
    """Pack codes below `2**bits`, uint8 `[..., in]`, as MLX stores them: uint32 `[..., in * bits / 32]`, low bits first."""
    lanes = codes.reshape(*codes.shape[:-1], -1, 32).astype(mx.uint32)
    words: list[mx.array] = [mx.zeros(lanes.shape[:-1], mx.uint32) for _ in range(bits)]
    for lane in range(32):
        word, shift = divmod(lane * bits, 32)
        words[word] = words[word] | (lanes[..., lane] << shift)
        if shift + bits > 32:
            words[word + 1] = words[word + 1] | (lanes[..., lane] >> (32 - shift))
    return mx.stack(words, axis=-1).reshape(*codes.shape[:-1], -1)
