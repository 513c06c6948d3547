"""Experts of few rows, next to their exact results in float64."""

from __future__ import annotations

from dataclasses import dataclass
from math import pi, sqrt

import mlx.core as mx
import numpy as np

from mlxinfer.kernels_metal.experts.launcher import Form, Matrices, Unit, experts_in, experts_out

from .quantized_products import Rounding, matrix
from .sealed_pages import to_float

SILU, GELU, RELU2, NOTHING = Unit("silu"), Unit("gelu_tanh"), Unit("relu_squared"), Unit()
CLAMPED = Unit("clamped_swiglu", 1.702, 7.0)
UNITS = (SILU, GELU, CLAMPED, RELU2, NOTHING)


@dataclass(frozen=True)
class Layer:
    """Matrices of experts, and their numbers in float64."""

    matrices: Matrices
    numbers: np.ndarray
    """`[experts, N, K]`."""
    bias: np.ndarray
    """`[experts, N]`; zeros without biases."""


def random(*shape: int, seed: int, size: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * np.float32(size)


def layer(kind: str, experts: int, n: int, k: int, dtype: mx.Dtype, *, biased: bool = False, seed: int = 1) -> Layer:
    """Random matrices in a format: "plain", "mxfp4", or bits and group of affine codes as in "4/64"."""
    if kind == "plain":
        weight = mx.array(random(experts, n, k, seed=seed)).astype(dtype)
        form, arrays, numbers = Form("plain"), (weight,), to_float(weight).astype(np.float64)
    else:
        found = matrix(kind, experts * n, k, dtype)
        bits, group = (4, 32) if kind == "mxfp4" else map(int, kind.split("/"))
        form = Form("mxfp4" if kind == "mxfp4" else "affine", bits, group)
        arrays, numbers = tuple(a.reshape(experts, n, -1) for a in found.arrays), found.numbers.reshape(experts, n, k)
    bias = mx.array(random(experts, n, seed=seed + 1)).astype(dtype) if biased else None
    exact = np.zeros((experts, n)) if bias is None else to_float(bias).astype(np.float64)
    return Layer(Matrices(form, arrays, bias), numbers, exact)


def choice(rows: int, count: int, experts: int) -> mx.array:
    """Different experts of each row; from the second row on, some of the row before."""
    order = np.random.default_rng(rows).permutation(experts)
    return mx.array([[int(order[(row * (count - 1) + i) % experts]) for i in range(count)] for row in range(rows)], mx.uint32)


def compute_both(kind: str, dtype: mx.Dtype = mx.bfloat16) -> list[mx.array]:
    """Run both kernels in a format for one row, as the context has them."""
    of, chosen = layer(kind, 4, 32, 256, dtype, biased=kind == "mxfp4"), choice(1, 2, 4)
    x, inner = mx.array(random(1, 256, seed=2)).astype(dtype), mx.array(random(1, 2, 256, seed=3)).astype(dtype)
    return [experts_in(x, chosen, of.matrices, SILU), experts_out(inner, chosen, mx.array(random(1, 2, seed=4)), of.matrices)]


def check_in(of: Layer, chosen: mx.array, unit: Unit, dtype: mx.Dtype, seed: int = 3) -> None:
    """Run the kernel as the context has it; its results are the exact ones, rounded once."""
    picked = np.array(chosen)
    k = of.numbers.shape[-1]
    x = mx.array(random(len(picked), k, seed=seed, size=0.5 / sqrt(k))).astype(dtype)
    found = experts_in(x, chosen, of.matrices, unit)
    rows = to_float(x).astype(np.float64)
    sums = np.einsum("tk,tjnk->tjn", rows, of.numbers[picked]) + of.bias[picked]
    sizes = np.einsum("tk,tjnk->tjn", np.abs(rows), np.abs(of.numbers[picked])) + np.abs(of.bias[picked])
    exact, slack = exact_unit(sums, 1e-6 * sizes, unit)
    assert (found.shape, found.dtype) == (exact.shape, dtype)
    error = np.abs(to_float(found) - exact)
    smallest = 6e-8 if dtype == mx.float16 else 0
    assert (error <= Rounding[dtype] * 1.001 * np.abs(exact) + slack + smallest).all(), (error - slack).max()


def exact_unit(sums: np.ndarray, slack: np.ndarray, unit: Unit) -> tuple[np.ndarray, np.ndarray]:
    """Return the unit of sums that may be off by `slack`, and how far off it may be."""
    if unit == NOTHING:
        return sums, slack
    if unit == RELU2:
        return np.maximum(sums, 0) ** 2, 2 * np.abs(sums) * slack + slack**2
    half = sums.shape[-1] // 2
    g, up = sums[..., :half], sums[..., half:]
    of_gate, of_up = slack[..., :half], slack[..., half:]
    if unit == CLAMPED:
        g, up = np.minimum(g, unit.limit), np.clip(up, -unit.limit, unit.limit) + 1
    steep = {SILU: g, GELU: 2 * sqrt(2 / pi) * (g + 0.044715 * g**3), CLAMPED: unit.alpha * g}[unit]
    exact = g / (1 + np.exp(np.minimum(-steep, 700))) * up
    # The slope of every gate is below 1.2 everywhere.
    return exact, 2 * (1.2 * of_gate * np.abs(up) + np.abs(g) * of_up + 1.2 * of_gate * of_up) + 2e-6 * np.abs(exact)


def check_out(of: Layer, chosen: mx.array, dtype: mx.Dtype, *, added: bool = False, seed: int = 5) -> None:
    """Likewise, for the weighted sum."""
    picked = np.array(chosen)
    n, k = of.numbers.shape[1:]
    x = mx.array(random(*picked.shape, k, seed=seed, size=1 / sqrt(k))).astype(dtype)
    shares = mx.array(np.abs(random(*picked.shape, seed=seed + 1)))
    other = mx.array(random(len(picked), n, seed=seed + 2)).astype(dtype) if added else None
    found = experts_out(x, chosen, shares, of.matrices, other)
    rows, parts = to_float(x).astype(np.float64), np.array(shares).astype(np.float64)
    exact = np.einsum("tj,tjk,tjnk->tn", parts, rows, of.numbers[picked]) + np.einsum("tj,tjn->tn", parts, of.bias[picked])
    sizes = np.einsum("tj,tjk,tjnk->tn", parts, np.abs(rows), np.abs(of.numbers[picked]))
    sizes += np.einsum("tj,tjn->tn", parts, np.abs(of.bias[picked]))
    if other is not None:
        exact, sizes = exact + to_float(other), sizes + np.abs(to_float(other))
    assert (found.shape, found.dtype) == ((len(picked), n), dtype)
    error = np.abs(to_float(found) - exact)
    assert (error <= Rounding[dtype] * 1.001 * np.abs(exact) + 1e-6 * sizes).all(), (error / sizes).max()
