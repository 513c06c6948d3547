"""Error feedback (GPTQ) in MLX's affine format: codes compensate for each other's errors.

With correlated inputs x, the expected squared error of a layer's outputs is `tr(E H E^T)`. E is the error of its matrix, and
`H = mean(x x^T) = U D U^T`, with U unit upper triangular and D diagonal. The error is then the sum over columns k of
`D_k |E_k + sum(E_j U_jk for j < k)|^2`. So columns are rounded one after another, each after adding the errors of earlier ones.
This is QuIP's form (arXiv:2307.13304) of the algorithm of arXiv:2210.17323.

The most important columns come first. Their groups stay in place, with the scales of the weighted fit. Scales from each group's range,
or columns in order, lose more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import numpy as np

from ... import kernels_cpu
from ...errors import ConversionError
from ...nn.activations import fused
from ...nn.weights import Format
from ...util.device import is_gpu
from .affine import Parts, fit_parts

DAMPING = 0.003
"""Share of the mean of H's diagonal that is added to the diagonal. Anything from 0.001 to 0.01 works as well."""
_MOST_DAMPING = 1.0
_COLUMNS = kernels_cpu.MOST_COLUMNS
_PANEL = 256
_PIECE = 1 << 24
"""Numbers of a matrix processed at once."""
_PART = 2048


@dataclass(frozen=True, slots=True)
class Factor:
    """Factors of H for error feedback."""

    order: np.ndarray
    """int64 `[in]`: columns in rounding order."""
    upper: np.ndarray
    """float32 `[in, in]`: U for the columns in that order. Below the unit diagonal, values are undefined."""
    importance: mx.array
    """float32 `[in]`: the damped diagonal of H, in the matrix's own column order."""


def factorize(hessian: np.ndarray, name: str, damping: float = DAMPING) -> Factor:
    """Factor `mean(x x^T)`, float32 `[in, in]`. `name` is the tensor's, for messages. Raises `ConversionError` for NaN and infinities."""
    diagonal = hessian.diagonal().astype(np.float64)
    if not np.isfinite(diagonal).all() or not np.isfinite(hessian.sum(dtype=np.float64)):
        raise ConversionError(
            f"the inputs of {name} became NaN or infinite while the model read the calibration text: "
            "convert it with --encoder fit, or calibrate with another text"
        )
    mean = float(diagonal.mean()) or 1.0
    order = np.argsort(-diagonal, kind="stable")
    while True:
        damped = np.where(diagonal > 0, diagonal, mean) + damping * mean
        found = _cholesky(hessian, damped, order)
        if found is not None:
            return Factor(order, found, mx.array(damped.astype(np.float32)))
        if damping > _MOST_DAMPING:
            raise ConversionError(f"what {name} reads cannot be factored: convert it with --encoder fit")
        damping *= 10


def _cholesky(hessian: np.ndarray, damped: np.ndarray, order: np.ndarray) -> np.ndarray | None:
    """Return U of `H = U D U^T`, or None if H is not positive definite. Computed in float64, scaled to a unit diagonal, in place."""
    turned = order[::-1]  # last column first, so that a lower factor becomes an upper one
    roots = np.sqrt(damped[turned])
    size = len(order)
    lower = np.empty((size, size), np.float64)
    for first in range(0, size, _PART):
        rows = slice(first, first + _PART)
        lower[rows] = hessian[np.ix_(turned[rows], turned)] / (roots[rows, None] * roots)
    np.fill_diagonal(lower, 1.0)
    for first in range(0, size, _PANEL):
        last = min(first + _PANEL, size)
        try:
            corner = np.linalg.cholesky(lower[first:last, first:last])
        except np.linalg.LinAlgError:
            return None
        lower[first:last, first:last] = corner
        panel = lower[last:, first:last] @ np.linalg.inv(corner).T
        lower[last:, first:last] = panel
        for at in range(last, size, _PART):  # only the lower half
            lower[at:, at : at + _PART] -= panel[at - last :] @ panel[at - last : at - last + _PART].T
    steps = lower.diagonal().copy()
    if not np.isfinite(steps).all():
        return None
    upper = np.empty((size, size), np.float32)
    for first in range(0, size, _PANEL):  # three matrices are in memory, so the fourth gets few columns at a time
        columns = slice(first, first + _PANEL)
        upper[::-1, ::-1][:, columns] = lower[:, columns] / steps[columns] * (roots[:, None] / roots[columns])
    return upper


def encode_with_feedback(weight: mx.array, form: Format, factor: Factor, start: Parts | None = None) -> Parts:
    """Return codes uint8 `[rows, in]`, scales and biases `[rows, in / group_size]` for `weight` `[rows, in]`, in its dtype.

    Scales are those of the weighted fit (`start`, if known); codes come from error feedback.
    """
    start = start or fit_parts(weight, form, factor.importance)
    scales = mx.where(start[1] == 0, mx.array(1, weight.dtype), start[1])
    rows, columns = weight.shape
    step = max(_PIECE // columns, 1)
    in_rows = _by_kernel if kernels_cpu.can_feed_back() else _by_mlx
    pieces = []
    for first in range(0, rows, step):
        here = slice(first, first + step)
        pieces.append(in_rows(weight[here], form, factor, scales[here], start[2][here]))
        mx.eval(pieces[-1])
    return mx.concatenate(pieces), scales, start[2]


def _by_kernel(weight: mx.array, form: Format, factor: Factor, scales: mx.array, biases: mx.array) -> mx.array:
    order, upper = factor.order, factor.upper
    plain = np.ascontiguousarray(to_numpy(weight).T[order])
    by_group = np.ascontiguousarray(to_numpy(scales).T), np.ascontiguousarray(to_numpy(biases).T)
    group_of = (order // form.group_size).astype(np.int32)
    errors, codes = np.empty_like(plain), np.empty(plain.shape, np.uint8)
    for first in range(0, len(order), _COLUMNS):
        here = slice(first, min(first + _COLUMNS, len(order)))
        target = plain[here] + upper[:first, here].T @ errors[:first]
        inner = np.ascontiguousarray(upper[here, here].T)
        codes[order[here]], errors[here] = kernels_cpu.feed_back(plain[here], target, inner, *by_group, group_of[here], form.bits)
    return mx.array(np.ascontiguousarray(codes.T))


def _by_mlx(weight: mx.array, form: Format, factor: Factor, scales: mx.array, biases: mx.array) -> mx.array:
    order, top = mx.array(factor.order), float(2**form.bits - 1)
    plain = weight.astype(mx.float32).T[order]
    by_group = scales.astype(mx.float32).T, biases.astype(mx.float32).T
    errors, codes = mx.zeros((0, weight.shape[0])), []
    for first in range(0, len(factor.order), _COLUMNS):
        here = slice(first, min(first + _COLUMNS, len(factor.order)))
        above = mx.array(factor.upper[:first, here])
        target = plain[here] + above.T @ errors if first else plain[here]
        weights = mx.array(np.triu(factor.upper[here, here], 1))
        group_of = order[here] // form.group_size
        found = _columns(plain[here], target, weights, by_group[0][group_of], by_group[1][group_of], top)
        codes.append(found[0])
        errors = mx.concatenate([errors, found[1]])
        mx.eval(errors, codes[-1])
    return mx.concatenate(codes)[mx.argsort(order)].T.astype(mx.uint8)


def _columns(
    plain: mx.array, target: mx.array, weights: mx.array, scales: mx.array, biases: mx.array, top: float
) -> tuple[mx.array, mx.array]:
    """Return codes and errors of columns `[columns, rows]`; `weights` is strictly upper triangular."""
    codes, errors = [], []
    for column in range(len(plain)):
        code, error = _rounded(target[column], plain[column], scales[column], biases[column], top)
        target = _after(target, weights[column][:, None], error)
        codes.append(code)
        errors.append(error)
    return mx.stack(codes), mx.stack(errors)


def _round(target: mx.array, plain: mx.array, scales: mx.array, biases: mx.array, top: float) -> tuple[mx.array, mx.array]:
    code = mx.clip(mx.round((target - biases) / scales), 0, top)
    return code, plain - (code * scales + biases)


_rounded = cast("Callable[..., tuple[mx.array, mx.array]]", fused(_round, shapeless=False))  # type: ignore[arg-type]
"""Codes and errors of one column `[rows]`. On a GPU launches dominate: fused, a column has two."""
_after = fused(lambda target, weights, error: target + weights * error, shapeless=False)
"""Later columns after one is rounded."""


def decode(parts: Parts, group_size: int) -> np.ndarray:
    """Return the numbers that codes, scales and biases stand for, float32 `[rows, in]`."""
    codes, scales, biases = (to_numpy(part) for part in parts)
    decoded: np.ndarray = codes * np.repeat(scales, group_size, -1) + np.repeat(biases, group_size, -1)
    return decoded


def to_numpy(array: mx.array) -> np.ndarray:
    """Convert to float32; a view if the array has that dtype."""
    return np.array(array.astype(mx.float32), copy=False)


def add_gram(sums: np.ndarray, rows: mx.array) -> None:
    """Add `x^T x` of `rows` `[tokens, in]` to `sums` float32 `[in, in]`.

    Computed in float32 whatever the rows' dtype: sums in 16 bits would lose the differences between columns.
    """
    x = rows.astype(mx.float32)
    if is_gpu():
        sums += np.array(x.T @ x)
    else:
        plain = np.array(x, copy=False)
        with np.errstate(invalid="ignore", over="ignore"):  # `factorize` reports NaN
            sums += plain.T @ plain


def matmul(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return `left @ right` in float32."""
    left, right = np.asarray(left, np.float32), np.asarray(right, np.float32)
    found: np.ndarray = np.array(mx.array(left) @ mx.array(right)) if is_gpu() else left @ right
    return found
