"""The residual stream between the parts of a model. On a GPU, one kernel adds the result of a part and computes the next norm, if it passed
its trial on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx

from ..kernels_metal.add_norm import launcher, reference
from ..kernels_metal.kernel_speed import Step, compare
from ..kernels_metal.kernel_trial import KernelTrial, Speeds, Verdict, choice_line, difference, kernels_in_use, unless_slower
from ..util.dataclass import dataclass
from .norms import RMSNorm, Sum

_ROWS = 3
_KNOWN_SUMS = 64
"""Shapes of rows for which a norm caches how its sum is computed."""
_USUAL_CHANNELS = 4096
"""Channels that `mlxinfer doctor` tries."""
_FACTORS = 0.5, 1.5
"""Factors of the result and of the sum in the trial."""
_MOST_ERROR = 0.02
"""Bound of `difference` in the trial."""


@dataclass(slots=True)
class ResidualStream:
    """The sum so far, and the result of the last part, which is added together with the next norm."""

    x: mx.array
    """`[T, hidden]`."""
    result: mx.array | None = None
    """`[T, hidden]`, not yet in `x`; None if `x` is complete."""
    after: RMSNorm | None = None
    """Applied to the result before it is added."""
    scale: float = 1.0
    """Factor of the result (Granite)."""
    gain: float = 1.0
    """Factor of the sum with the result (Gemma 4)."""
    bias: mx.array | None = None
    """Added to the result first, `[hidden]`."""

    def sum(self) -> mx.array:
        """Return the whole stream, `[T, hidden]`."""
        if self.result is None:
            return self.x
        if self.after is not None and not self.after.centring:
            return self._known(self.after, None)(self.result, self.x)[0]
        y = self.result if self.bias is None else self.result + self.bias
        y = y if self.after is None else self.after(y)
        x = self.x + y if self.scale == 1.0 else (self.x + y * mx.array(self.scale)).astype(self.x.dtype)
        return x if self.gain == 1.0 else x * self.gain

    def normed(self, norm: RMSNorm | None) -> tuple[mx.array, mx.array]:
        """Return the whole stream and its norm for the next part, both `[T, hidden]`. Without `norm`, both are the stream."""
        if self.result is None or norm is None or norm.centring:
            x = self.sum()
            return x, x if norm is None else norm(x)
        return self._known(norm, norm)(self.result, self.x)

    def _known(self, keeper: RMSNorm, norm: RMSNorm | None) -> Sum:
        """Return the computation of the sum and its norm, which `keeper` caches."""
        x, result, known = self.x, self.result, keeper.sums
        assert result is not None
        key = x.shape, x.dtype, result.dtype, self.after, self.scale, self.gain, id(self.bias), norm, TRIAL.age
        way = known.get(key)
        if way is None:
            if len(known) >= _KNOWN_SUMS:
                known.clear()
            way = known[key] = self._computation_of_sum(result, norm)
        return way

    def _computation_of_sum(self, result: mx.array, norm: RMSNorm | None) -> Sum:
        """Return the computation of sums of this shape; without `norm`, its second result has no meaning."""
        after, before = ((each.weight, each.eps) if each else None for each in (self.after, norm))
        scale, gain, bias = self.scale, self.gain, self.bias
        if not self._kernel_fits(result, norm):
            return lambda result, x: reference.add_norm(result, x, after, before, scale, gain, bias)
        launch = launcher.launch_of(result, self.x, after, before, bias)
        fixed = launcher.inputs_of(result, self.x, after, before, scale, gain, bias)[2:]

        def run(result: mx.array, x: mx.array) -> tuple[mx.array, mx.array]:
            sums, normed = launch.run([result, x, *fixed])
            return sums, normed

        return run

    def _kernel_fits(self, result: mx.array, norm: RMSNorm | None) -> bool:
        dtype, after, bias = self.x.dtype, self.after, self.bias
        if result.dtype != dtype or any(each is not None and each.weight.dtype != dtype for each in (norm, after)):
            return False
        kind = after is not None, norm is not None, *([True] if bias is not None else [])
        return (bias is None or bias.dtype == dtype) and TRIAL.obstacle(dtype, self.x.shape[1], *kind) is None


Kind = tuple[bool, bool]
"""True if results are normed before they are added, and True if the sum is normed; a third True if results have a bias."""


def fallback_lines(dtype: mx.Dtype, channels: int, kinds: Iterable[Kind]) -> list[str]:
    """Describe sums and norms that are computed separately on a GPU. Runs the trials."""
    return TRIAL.lines((dtype, channels, *kind) for kind in kinds) if kernels_in_use() else []


def _example(rows: int, dtype: mx.Dtype, channels: int, after: bool, before: bool, biased: bool = False) -> list[Any]:
    """Return the arguments of `add_norm` without factors: result and stream, `[rows, channels]` each, both norms and the bias."""
    keys = mx.random.split(mx.random.key(channels), 5)
    arrays = [mx.random.normal((rows, channels), key=key).astype(dtype) for key in keys[:2]]
    weights = [mx.random.normal((channels,), key=key).astype(dtype) for key in keys[2:]]
    mx.eval(arrays, weights)
    return [*arrays, (weights[0], 1e-5) if after else None, (weights[1], 1e-6) if before else None, weights[2] if biased else None]


def _check_add_norm(*kind: Any) -> str | None:
    *given, bias = _example(_ROWS, *kind)
    given += [*_FACTORS, bias]
    pairs = zip(launcher.add_norm(*given), reference.add_norm(*given), strict=True)
    errors = [error for got, expected in pairs if (error := difference(got, expected, _MOST_ERROR))]
    return f"its answers {errors[0]}" if errors else None


def _speeds(*kind: Any) -> Speeds:
    """Compare sums of one row, each of which is the next one's result."""
    result, stream, *norms, bias = _example(1, *kind)
    which = int(kind[3])

    def by(add_norm: Callable[..., tuple[mx.array, mx.array]]) -> Step:
        return lambda x, _: add_norm(x, stream, *norms, bias=bias)[which]

    return {1: compare(by(launcher.add_norm), by(reference.add_norm), result, busy=True)}


def _describe(kind: Any, verdict: Verdict) -> str:
    dtype, channels, after, before, *biased = kind
    steps = (["with a bias"] if biased else []) + (["of normed results"] if after else []) + (["normed"] if before else [])
    return ", ".join(["", f"{channels} channels", *steps, str(dtype).rpartition(".")[2]]) + f": {choice_line(verdict)}"


TRIAL = KernelTrial("sums with norms", _check_add_norm, speeds=_speeds, choose=unless_slower, describe=_describe)
"""By dtype, channels, and `Kind`."""


def try_usual(dtype: mx.Dtype) -> None:
    """Try the kernel for a model of usual size, if this device runs it."""
    if kernels_in_use():
        TRIAL.obstacle(dtype, _USUAL_CHANNELS, False, True)
