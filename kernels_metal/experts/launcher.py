"""Launches the kernels of experts: checks arrays, and chooses template arguments and thread counts."""

from __future__ import annotations

from functools import lru_cache
from typing import Union

import mlx.core as mx

from ...errors import UnsupportedShapeError
from ...util.dataclass import dataclass
from ..executors import Launch
from ..quantized_matmul.launcher import FLOATS, simdgroups_of, why_unsupported

UNITS = {"": 0, "silu": 1, "gelu_tanh": 2, "clamped_swiglu": 3, "relu_squared": 4}
"""Activations by their names in `nn.activations`, "" for none. `clamped_swiglu` is the gated unit of gpt-oss."""
_SINGLE = ("", "relu_squared")
"""Units without gates: the matrix has one row per number."""
_FILE = "experts/experts.metal"
PIECE, WHOLE = 32, 8
"""Numbers of a row per load of a lane, which divide K; smaller arrays are passed in another address space."""
_ROWS = 16
"""Rows of a matrix in a threadgroup's tile."""
_THOUSAND = 1000
_KNOWN_SHAPES = 4096

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """Format of the matrices of all experts."""

    mode: str
    """"affine", "mxfp4", or "plain" for numbers in the dtype of x."""
    bits: int = 16
    group_size: int = 0
    """Numbers that share a scale; 0 if plain."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Activation between the two products of an expert."""

    name: str = ""
    """One of `UNITS`."""
    alpha: float = 0.0
    limit: float = 0.0
    """Numbers of `clamped_swiglu`, multiples of 1/1000."""

    @property
    def sides(self) -> int:
        """Matrix rows per number of the result: 2 for gates and ups, otherwise 1."""
        return 1 if self.name in _SINGLE else 2


@dataclass(frozen=True, slots=True)
class Matrices:
    """The matrices of all experts, `[experts, N, K]`."""

    form: Form
    arrays: tuple[mx.array, ...]
    """Codes uint32 `[experts, N, K * bits / 32]`, scales and, if affine, biases, both `[experts, N, K / group_size]`; or the numbers."""
    bias: mx.array | None = None
    """`[experts, N]`, added to products."""


def experts_in(x: mx.array, chosen: mx.array, matrices: Matrices, unit: Unit) -> mx.array:
    """Apply `unit` to the products of x `[T, K]` with the matrices of its chosen experts, uint32 `[T, k]`: `[T, k, N / unit.sides]`.

    Gates are the first half of a matrix's rows. Sums are float32, and results are rounded once, after the unit. Raises ValueError for
    arrays that do not fit together, and `UnsupportedShapeError` for what has no kernel.
    """
    launch = launch_in(x.shape, chosen.shape, x.dtype, matrices, unit)
    return launch.run([x, chosen, *matrices.arrays, x if matrices.bias is None else matrices.bias])[0]


def experts_out(x: mx.array, chosen: mx.array, shares: mx.array, matrices: Matrices, added: mx.array | None = None) -> mx.array:
    """Add up the products of x `[T, k, K]` with the matrices of the chosen experts, uint32 `[T, k]`, times `shares`, float32 `[T, k]`, and
    `added` `[T, N]`: `[T, N]`. Sums are float32 and rounded once. Raises the errors of `experts_in`."""
    bias = x if matrices.bias is None else matrices.bias
    launch = launch_out(x.shape, chosen.shape, x.dtype, matrices, added is not None)
    return launch.run([x, chosen, shares, *matrices.arrays, bias, x if added is None else added])[0]


def launch_in(x: Shape, chosen: Shape, dtype: mx.Dtype, matrices: Matrices, unit: Unit) -> Launch:
    """Return the launch of `experts_in` for arrays of these shapes, which callers may cache. Raises its errors."""
    return _launch_in(x, chosen, dtype, *_described(matrices), unit)


def launch_out(x: Shape, chosen: Shape, dtype: mx.Dtype, matrices: Matrices, added: bool) -> Launch:
    """Return the launch of `experts_out`, likewise."""
    return _launch_out(x, chosen, dtype, *_described(matrices), added)


def why_no_form(form: Form, dtype: mx.Dtype, scales: mx.Dtype) -> str | None:
    """Return the reason why matrices of this form have no kernel; None if they have one."""
    if form.mode == "plain":
        return None if dtype in FLOATS and scales == dtype else f"no experts of {scales} for {dtype}"
    return why_unsupported(dtype, form.bits, form.group_size, form.mode, scales)


def why_no_unit(unit: Unit) -> str | None:
    """Return the reason why this unit has no kernel; None if it has one."""
    if unit.name not in UNITS:
        return f"no experts with {unit.name}; there are {', '.join(filter(None, UNITS))}"
    exact = all(abs(_THOUSAND * n - round(_THOUSAND * n)) < 1e-6 for n in (unit.alpha, unit.limit))
    return None if exact else f"no {unit.name} of {unit.alpha} and {unit.limit}, which are not multiples of 1/1000"


_Arrays = tuple[tuple[Shape, mx.Dtype], ...]
_Template = list[tuple[str, Union[int, mx.Dtype]]]


def _described(matrices: Matrices) -> tuple[Form, _Arrays, Union[tuple[Shape, mx.Dtype], None]]:
    bias = matrices.bias
    return matrices.form, tuple((a.shape, a.dtype) for a in matrices.arrays), None if bias is None else (bias.shape, bias.dtype)


@lru_cache(_KNOWN_SHAPES)
def _launch_in(
    x: Shape, chosen: Shape, dtype: mx.Dtype, form: Form, arrays: _Arrays, bias: tuple[Shape, mx.Dtype] | None, unit: Unit
) -> Launch:
    if len(x) != 2 or len(chosen) != 2 or x[0] != chosen[0] or not chosen[1]:
        raise ValueError(f"experts {list(chosen)} of rows {list(x)}; expected [T, k] of [T, K]")
    if problem := why_no_unit(unit):
        raise UnsupportedShapeError(problem)
    rows = _checked(x[1], dtype, form, arrays, bias)
    if rows % unit.sides:
        raise ValueError(f"matrices of {rows} rows have no half of gates")
    pairs, width = chosen[0] * chosen[1], rows // unit.sides
    numbers: _Template = [("ALPHA", round(_THOUSAND * unit.alpha)), ("LIMIT", round(_THOUSAND * unit.limit))]
    template = [("GATE", UNITS[unit.name]), *numbers, ("BIASED", int(bias is not None))]
    return _launch("in", form, dtype, template, (*chosen, width), (pairs, -(-rows // _ROWS)), simdgroups_of(rows * pairs, x[1]))


@lru_cache(_KNOWN_SHAPES)
def _launch_out(
    x: Shape, chosen: Shape, dtype: mx.Dtype, form: Form, arrays: _Arrays, bias: tuple[Shape, mx.Dtype] | None, added: bool
) -> Launch:
    if len(x) != 3 or x[:2] != chosen or not chosen[1]:
        raise ValueError(f"experts {list(chosen)} of rows {list(x)}; expected [T, k] of [T, k, K]")
    rows = _checked(x[2], dtype, form, arrays, bias)
    template: _Template = [("BIASED", int(bias is not None)), ("ADDED", int(added))]
    simdgroups = simdgroups_of(rows * chosen[0], chosen[1] * x[2])
    return _launch("out", form, dtype, template, (chosen[0], rows), (chosen[0], -(-rows // _ROWS)), simdgroups)


def _checked(k: int, dtype: mx.Dtype, form: Form, arrays: _Arrays, bias: tuple[Shape, mx.Dtype] | None) -> int:
    """Return the rows of a matrix. Raises the errors of `experts_in`."""
    if problem := why_no_form(form, dtype, arrays[-1][1]):
        raise UnsupportedShapeError(problem)
    outer = arrays[0][0][:2]
    if form.mode == "plain":
        expected = [(*outer, k)]
    else:
        expected = [(*outer, k * form.bits // 32), *[(*outer, k // form.group_size)] * (1 if form.mode == "mxfp4" else 2)]
    right = [shape for shape, _ in arrays] == expected and not k % max(form.group_size, PIECE)
    if not right or (form.mode != "plain" and arrays[0][1] != mx.uint32):
        raise ValueError(f"matrices of {[list(shape) for shape, _ in arrays]} do not multiply rows of {k}; expected {expected}")
    if bias is not None and bias[0] != outer:
        raise ValueError(f"biases are {list(bias[0])}; expected {list(outer)}")
    if bias is not None and bias[1] != dtype:
        raise UnsupportedShapeError(f"no experts of {dtype} with biases of {bias[1]}")
    if outer[0] * outer[1] < WHOLE:
        raise UnsupportedShapeError(f"no experts with matrices of {list(outer)}")
    return outer[1]


def _launch(way: str, form: Form, dtype: mx.Dtype, template: _Template, shape: Shape, groups: tuple[int, int], simdgroups: int) -> Launch:
    template = [("T", dtype), *template]
    if form.mode == "affine":
        template += [("BITS", form.bits), ("GROUP", form.group_size)]
    threads = 32 * simdgroups
    return Launch(_FILE, f"{form.mode}_experts_{way}", template, [shape], [dtype], (threads * groups[0], groups[1], 1), (threads, 1, 1))
