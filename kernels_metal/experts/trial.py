"""Trial of the kernels of experts on this machine: results compared with plain MLX's, and speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import mlx.core as mx

from ...util.dataclass import dataclass
from ..kernel_speed import Clock, compare
from ..kernel_trial import Speed, difference
from . import reference
from .launcher import PIECE, WHOLE, Form, Matrices, Unit, experts_in, experts_out, why_no_form, why_no_unit

FEW = 4
"""Rows of the second variant that is timed: it stands for all numbers of rows but one."""
_EXPERTS, _INNER, _HIDDEN = 6, 384, 640
"""Sizes of the small case: neither has a multiple of 256 numbers."""
_MOST_ERROR, _MEAN_ERROR = 0.02, 0.005
"""Bounds of `difference`."""
_BYTES = 64 << 20
"""Total bytes of the timed matrices: more than a cache stores."""
SECONDS = 0.2
"""Duration of a measurement, once per machine."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Experts of a model."""

    into: Form
    """Format of the matrices that the unit follows."""
    out: Form
    unit: Unit
    dtype: mx.Dtype
    """The dtype of x, of results, biases and affine scales."""
    hidden: int
    inner: int
    chosen: int
    """Experts of a row."""
    biased: bool = False
    """True if both products have biases."""
    added: bool = False
    """True if the result of a shared expert is added."""


def why_unsupported(subject: Subject) -> str | None:
    """Return the reason why these experts have no kernel; None if they have one."""
    dtype, into, out = subject.dtype, subject.into, subject.out
    if subject.hidden % max(into.group_size, PIECE) or subject.inner % max(out.group_size, PIECE):
        return f"no experts of {subject.hidden} and {subject.inner} numbers"
    problems = [why_no_form(form, dtype, mx.uint8 if form.mode == "mxfp4" else dtype) for form in (into, out)]
    return next(filter(None, (why_no_unit(subject.unit), *problems)), None)


def wrong_experts(subject: Subject) -> str | None:
    """Compute a small case with each variant. Return the fault, or None. Raises RuntimeError or ValueError if a kernel cannot run."""
    into, out = _matrices(subject, _EXPERTS, _HIDDEN, _INNER)
    exact, dtype = partial(_in_float32, subject), subject.dtype
    for rows in (1, max(3, -(-WHOLE // subject.chosen))):  # fewer experts in all make another variant
        keys = mx.random.split(mx.random.key(rows), 4)
        x, added = (mx.random.normal((rows, _HIDDEN), key=key).astype(dtype) for key in keys[:2])
        chosen = mx.random.randint(0, _EXPERTS, (rows, subject.chosen), mx.uint32, keys[2])
        shares = mx.random.uniform(0, 1, chosen.shape, key=keys[3])
        inner = experts_in(x, chosen, into, subject.unit)
        other = added if subject.added else None
        results = {
            "inner": (inner, reference.experts_in(x.astype(mx.float32), chosen, exact(into), subject.unit)),
            "sum": (
                experts_out(inner, chosen, shares, out, other),
                reference.experts_out(inner.astype(mx.float32), chosen, shares, exact(out), other),
            ),
        }
        for name, (found, expected) in results.items():
            if error := difference(found, expected, _MOST_ERROR, _MEAN_ERROR):
                return f"the {name} of {rows} rows {error}"
    return None


def speeds(subject: Subject, seconds: float = SECONDS, *, clock: Clock = time.perf_counter, most_bytes: int = _BYTES) -> dict[int, Speed]:
    """Measure the speed of one row, and of `FEW`, compared with MLX's operations, for about `seconds` in total. Each layer chooses other
    experts, whose matrices are more than a cache stores in total."""
    k = subject.chosen
    per_expert = subject.hidden * subject.inner * (subject.unit.sides * subject.into.bits + subject.out.bits) // 8
    experts = max(most_bytes // per_expert, 2 * k)
    into, out = _matrices(subject, experts, subject.hidden, subject.inner)
    mx.eval(into.arrays, out.arrays)
    found = {}
    for rows in (1, FEW):
        x, shares = mx.ones((rows, subject.hidden), subject.dtype), mx.full((rows, k), 1 / k)
        layers = [(mx.arange(rows * k, dtype=mx.uint32).reshape(rows, k) + layer * k) % experts for layer in range(experts // k)]
        mx.eval(x, shares, layers)
        ours = partial(_ours, subject, into, out, layers, shares)
        theirs = partial(_theirs(subject), into, out, layers, shares)
        found[rows] = compare(ours, theirs, x, steps=len(layers), seconds=seconds / 2, clock=clock)
    return found


def _ours(subject: Subject, into: Matrices, out: Matrices, layers: list[mx.array], shares: mx.array, x: mx.array, layer: int) -> mx.array:
    inner = experts_in(x, layers[layer], into, subject.unit)
    return experts_out(inner, layers[layer], shares, out, x if subject.added else None)


def _theirs(subject: Subject) -> Callable[..., mx.array]:
    """Return MLX's operations, with the elementwise ones fused as in a model."""
    unit = reference.activated if subject.unit.sides == 1 else reference.gated
    one = partial(unit, unit=subject.unit)
    fused = mx.compile(one, shapeless=True) if mx.default_device() == mx.gpu else one

    def compute(into: Matrices, out: Matrices, layers: list[mx.array], shares: mx.array, x: mx.array, layer: int) -> mx.array:
        y = reference.gathered(x[:, None, None], layers[layer], into).squeeze(-2)
        inner = fused(y) if subject.unit.sides == 1 else fused(*mx.split(y, 2, axis=-1))
        return reference.experts_out(inner, layers[layer], shares, out, x if subject.added else None)

    return compute


def _matrices(subject: Subject, experts: int, hidden: int, inner: int) -> tuple[Matrices, Matrices]:
    """Return random matrices of small numbers."""
    shapes = (experts, subject.unit.sides * inner, hidden), (experts, hidden, inner)
    into, out = (
        Matrices(form, _arrays(form, subject.dtype, shape), _bias(shape[:2], subject.dtype) if subject.biased else None)
        for form, shape in zip((subject.into, subject.out), shapes, strict=True)
    )
    return into, out


def _bias(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(shape[-1])).astype(dtype)


def _arrays(form: Form, dtype: mx.Dtype, shape: tuple[int, int, int]) -> tuple[mx.array, ...]:
    experts, n, k = shape
    if form.mode == "plain":
        return ((mx.random.uniform(-1 / 32, 1 / 32, shape, mx.float32, mx.random.key(n))).astype(dtype),)
    words = mx.random.randint(-(2**31), 2**31 - 1, (experts, n, k * form.bits // 32), mx.int32).view(mx.uint32)
    groups = experts, n, k // form.group_size
    if form.mode == "mxfp4":
        return words, mx.full(groups, 121, mx.uint8)
    return words, mx.full(groups, 2.0**-form.bits / 16, dtype), mx.full(groups, -1 / 32, dtype)


def _in_float32(subject: Subject, matrices: Matrices) -> Matrices:
    """Return the same numbers, unpacked by MLX."""
    f, (words, *scales) = matrices.form, matrices.arrays
    if f.mode == "affine":
        words = mx.dequantize(words, scales[0].astype(mx.float32), scales[1].astype(mx.float32), f.group_size, f.bits)
    elif f.mode == "mxfp4":
        words = mx.dequantize(words, scales[0], None, f.group_size, f.bits, f.mode)
    bias = None if matrices.bias is None else matrices.bias.astype(mx.float32)
    return Matrices(Form("plain"), (words.astype(mx.float32),), bias)
