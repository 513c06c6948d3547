"""The residual stream between the parts of a model. On a GPU, one kernel adds the result of a part and computes the next norm, if it passed
its trial on this machine."""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx

from ..kernels_metal.add_norm import launcher, reference
from ..kernels_metal.add_norm.reference import Norm
from ..kernels_metal.kernel_trial import KernelTrial, difference, kernels_in_use
from ..util.dataclass import dataclass
from .norms import RMSNorm, Sum

_ROWS = 3
_KNOWN_SUMS = 64
"""Shapes of rows for which a norm caches how its sum is computed."""
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

    def sum(self) -> mx.array:
        """Return the whole stream, `[T, hidden]`."""
        if self.result is None:
            return self.x
        y = self.result if self.after is None else self.after(self.result)
        return self.x + y if self.scale == 1.0 else (self.x + y * mx.array(self.scale)).astype(self.x.dtype)

    def normed(self, norm: RMSNorm | None) -> tuple[mx.array, mx.array]:
        """Return the whole stream and its norm for the next part, both `[T, hidden]`. Without `norm`, both are the stream."""
        if self.result is None or norm is None or norm.centring:
            x = self.sum()
            return x, x if norm is None else norm(x)
        x, known = self.x, norm.sums
        key = x.shape, x.dtype, self.result.dtype, self.after, self.scale, TRIAL.age
        way = known.get(key)
        if way is None:
            if len(known) >= _KNOWN_SUMS:
                known.clear()
            way = known[key] = self._computation_of_sum(self.result, norm)
        return way(self.result, x)

    def _computation_of_sum(self, result: mx.array, norm: RMSNorm) -> Sum:
        """Return the computation of sums of this shape."""
        after, before, scale = None if self.after is None else (self.after.weight, self.after.eps), (norm.weight, norm.eps), self.scale
        if not self._kernel_fits(result, norm):
            return lambda result, x: reference.add_norm(result, x, after, before, scale)
        launch = launcher.launch_of(result, self.x, after, before)
        fixed = launcher.inputs_of(result, self.x, after, before, scale)[2:]

        def run(result: mx.array, x: mx.array) -> tuple[mx.array, mx.array]:
            sums, normed = launch.run([result, x, *fixed])
            return sums, normed

        return run

    def _kernel_fits(self, result: mx.array, norm: RMSNorm) -> bool:
        dtype, weight, after = self.x.dtype, norm.weight, self.after
        if weight.dtype != dtype or result.dtype != dtype or (after is not None and after.weight.dtype != dtype):
            return False
        return TRIAL.obstacle(dtype, weight.shape[0], after is not None) is None


def fallback_lines(dtype: mx.Dtype, channels: int, kinds: Iterable[bool]) -> list[str]:
    """Describe sums and norms that are computed separately on a GPU. Runs the trials: `kinds` has True for sums whose result is normed
    before it is added, and False for others."""
    return TRIAL.lines((dtype, channels, after) for after in kinds) if kernels_in_use() else []


def _check_add_norm(dtype: mx.Dtype, channels: int, after: bool) -> str | None:
    keys = mx.random.split(mx.random.key(channels), 4)
    result, stream = (mx.random.normal((_ROWS, channels), key=key).astype(dtype) for key in keys[:2])
    weights = [mx.random.normal((channels,), key=key).astype(dtype) for key in keys[2:]]
    norms: tuple[Norm | None, Norm] = ((weights[0], 1e-5) if after else None, (weights[1], 1e-6))
    pairs = zip(launcher.add_norm(result, stream, *norms), reference.add_norm(result, stream, *norms), strict=True)
    errors = [error for got, expected in pairs if (error := difference(got, expected, _MOST_ERROR))]
    return f"its answers {errors[0]}" if errors else None


TRIAL = KernelTrial("sums with norms", _check_add_norm)
"""By dtype, channels, and True if results are normed before they are added."""
