"""Experts of few rows on an Apple GPU: two launches instead of five to seven, if a trial on this machine favours them.

The experts of a model are tried when its first layer with experts is loaded: a small case, then the speed for matrices of its sizes. The
result is kept on disk. Plain MLX computes all others, and all experts of many rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import mlx.core as mx

from ..kernels_metal.kernel_trial import KernelTrial, Kind, Speed, Verdict
from ..util.dataclass import dataclass
from ..util.device import is_gpu
from .activations import Activated, ClampedSwiglu, relu_squared
from .small_batch_matmul import in_use
from .weights import Dense, Quantized, map_rows

if TYPE_CHECKING:
    from ..kernels_metal.experts.launcher import Form, Matrices, Unit
    from ..kernels_metal.experts.trial import Subject
    from .linear import Linear

WeightedExperts = Callable[[mx.array, mx.array, mx.array, mx.array | None], mx.array]
"""Function from x `[T, hidden]`, the chosen experts uint32 `[T, k]`, their shares float32 `[T, k]`, and what is added `[T, hidden]`, to
`[T, hidden]`."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Products of experts, and the activation between them."""

    into: Linear
    """`[experts, inner, hidden]`; with a gate, twice as many rows, gates first."""
    out: Linear
    """`[experts, hidden, inner]`."""
    gate: object
    """A gated unit, or the activation of each number."""


def computation(parts: Parts, x: mx.array, chosen: mx.array, added: mx.array | None) -> WeightedExperts | None:
    """Return the computation of experts for arrays like these by the kernels; None if plain MLX is used."""
    rows, count = chosen.shape
    subject = subject_of(parts, x.dtype, count, added=added is not None)
    if subject is None or not is_gpu() or not _is_faster(subject, rows):
        return None
    if chosen.dtype != mx.uint32 or (added is not None and added.dtype != x.dtype):
        return None
    from ..kernels_metal.experts.launcher import launch_in, launch_out

    into, out = _matrices(parts.into), _matrices(parts.out)
    first = launch_in(x.shape, chosen.shape, x.dtype, into, subject.unit)
    second = launch_out((rows, count, subject.inner), chosen.shape, x.dtype, out, subject.added)
    of_first, of_second = ([*m.arrays] for m in (into, out))

    def compute(x: mx.array, chosen: mx.array, shares: mx.array, added: mx.array | None) -> mx.array:
        inner = first.run([x, chosen, *of_first, x if into.bias is None else into.bias])[0]
        bias, other = inner if out.bias is None else out.bias, inner if added is None else added
        return second.run([inner, chosen, shares, *of_second, bias, other])[0]

    return compute


def try_experts(parts: Parts, dtype: mx.Dtype, count: int, *, added: bool) -> Verdict | None:
    """Return how experts like these are computed, `count` of each row. They are tried and measured once. None if there is no kernel for
    them, or this device does not run the kernels.

    Matrices that the kernels will read are laid out row by row, as the kernels would otherwise copy them in every step. The slots of a pool
    are laid out so already.
    """
    subject = subject_of(parts, dtype, count, added=added) if in_use() else None
    if subject is None:
        return None
    verdict = TRIAL.try_now(subject, speeds=_speeds)
    if verdict.speeds:
        for linear in (parts.into, parts.out):
            if isinstance(linear.matrix, (Dense, Quantized)) and not getattr(linear, "in_pool", False):
                linear.matrix = map_rows(linear.matrix, mx.contiguous)
    return verdict


def _is_faster(subject: Subject, rows: int) -> bool:
    from ..kernels_metal.experts.trial import FEW

    verdict = TRIAL.verdicts.get((subject,))
    return verdict is not None and (1 if rows == 1 else FEW) in verdict.speeds


def subject_of(parts: Parts, dtype: mx.Dtype, count: int, *, added: bool) -> Subject | None:
    """Return the subject of the trial of these experts, `count` of each row, for activations of this dtype; None if there is no kernel for
    them. `added` is True if a shared expert's result is added."""
    from ..kernels_metal.experts.trial import Subject, why_unsupported

    unit, into, out = _unit(parts.gate), _form(parts.into, dtype), _form(parts.out, dtype)
    biased = {linear.bias is not None for linear in (parts.into, parts.out)}
    if unit is None or into is None or out is None or len(biased) > 1:
        return None
    hidden, inner = parts.out.matrix.shape[1:]
    subject = Subject(into, out, unit, dtype, hidden, inner, count, biased.pop(), added)
    return None if why_unsupported(subject) else subject


def _unit(gate: object) -> Unit | None:
    from ..kernels_metal.experts.launcher import UNITS, Unit

    if isinstance(gate, ClampedSwiglu):
        return Unit("clamped_swiglu", gate.alpha, gate.limit)
    if gate is relu_squared:
        return Unit("relu_squared")
    return Unit(gate.activation) if isinstance(gate, Activated) and gate.activation in UNITS else None


def _form(linear: Linear, dtype: mx.Dtype) -> Form | None:
    """Return the format of matrices that a kernel may read; None for others. Subclasses of matrices record the rows that they multiply."""
    from ..kernels_metal.experts.launcher import Form

    matrix, bias = linear.matrix, linear.bias
    if bias is not None and bias.dtype != dtype:
        return None
    if type(matrix) is Dense:
        return Form("plain") if matrix.weight.dtype == dtype else None
    if type(matrix) is not Quantized or (matrix.biases is not None and matrix.scales.dtype != dtype):
        return None
    return Form(matrix.format.mode, matrix.format.bits, matrix.format.group_size)


def _matrices(linear: Linear) -> Matrices:
    from ..kernels_metal.experts.launcher import Form, Matrices

    matrix = linear.matrix
    if isinstance(matrix, Dense):
        return Matrices(Form("plain"), (matrix.weight,), linear.bias)
    assert isinstance(matrix, Quantized)
    f, arrays = matrix.format, (matrix.weight, matrix.scales, matrix.biases)
    return Matrices(Form(f.mode, f.bits, f.group_size), tuple(a for a in arrays if a is not None), linear.bias)


def _check(subject: Subject) -> str | None:
    from ..kernels_metal.experts.trial import wrong_experts

    return wrong_experts(subject)


def _speeds(subject: Subject) -> dict[int, Speed]:
    from ..kernels_metal.experts.trial import speeds

    return speeds(subject)


def _describe(kind: Kind, verdict: Verdict) -> str:
    (subject,) = kind
    forms = dict.fromkeys(_named(form) for form in (subject.into, subject.out))
    name = f", {subject.chosen} a row, {' and '.join(forms)}, {str(subject.dtype).rpartition('.')[2]}"
    if verdict.obstacle:
        return f"{name}: plain MLX, as {verdict.obstacle}"
    speeds = ", ".join(f"{speed.times_mlx:.2g}x at {rows}" for rows, speed in sorted(verdict.speeds.items()))
    return f"{name}: this project's kernels; next to plain MLX {speeds} rows"


def _named(form: Form) -> str:
    if form.mode == "plain":
        return "not quantized"
    return "mxfp4" if form.mode == "mxfp4" else f"{form.bits}-bit in groups of {form.group_size}"


TRIAL = KernelTrial("experts of few rows", _check, describe=_describe)
"""By `Subject`."""
