"""The residual stream between the parts of a model. On a GPU, adding a part's result and the norm that the next part begins with are one
kernel, if that has passed its trial on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from ..cache.attention.select import SWITCH
from ..device import is_gpu
from ..kernels_metal.add_norm import launcher, reference
from ..kernels_metal.add_norm.reference import Norm
from .norms import RMSNorm

_ROWS = 3
_MOST_ERROR = 0.02
"""In the trial, relative to the largest number: wrong code is wrong by far more, and rounding in 16 bits by less."""


@dataclass(frozen=True, slots=True)
class Stream:
    """What has been added up so far, and the result of the last part, which is added together with the next norm."""

    x: mx.array
    """`[T, hidden]`."""
    result: mx.array | None = None
    """`[T, hidden]`, not yet in `x`; None if nothing is missing there."""
    after: RMSNorm | None = None
    """Applied to the result before it is added."""
    scale: float = 1.0
    """Factor of the result (Granite)."""

    def sum(self) -> mx.array:
        """The whole stream, `[T, hidden]`."""
        if self.result is None:
            return self.x
        y = self.result if self.after is None else self.after(self.result)
        return self.x + y if self.scale == 1.0 else (self.x + y * mx.array(self.scale)).astype(self.x.dtype)

    def normed(self, norm: RMSNorm | None) -> tuple[mx.array, mx.array]:
        """The whole stream, and what a part that begins with `norm` reads, both `[T, hidden]`."""
        if self.result is None or norm is None:
            x = self.sum()
            return x, x if norm is None else norm(x)
        after = None if self.after is None else (self.after.weight, self.after.eps)
        add_norm = launcher.add_norm if self._fits(self.result, norm) else reference.add_norm
        return add_norm(self.result, self.x, after, (norm.weight, norm.eps), self.scale)

    def _fits(self, result: mx.array, norm: RMSNorm) -> bool:
        dtype, weight, after = self.x.dtype, norm.weight, self.after
        if weight.dtype != dtype or result.dtype != dtype or (after is not None and after.weight.dtype != dtype):
            return False
        return why_unsupported(dtype, weight.shape[0], after is not None) is None


def in_use() -> bool:
    """Whether a model should hand its stream on as a `Stream`. On a CPU, products take in norms and sums themselves."""
    if not is_gpu() or os.environ.get(SWITCH) == "0":
        return False
    from ..kernels_metal import executors

    return executors.available()


def fallback_lines(dtype: mx.Dtype, channels: int, kinds: Iterable[bool]) -> list[str]:
    """Why sums and norms are computed one by one, if they are. Runs the trials: `kinds` says whether results are normed before they are
    added, for each kind of sum that a model has."""
    reasons = dict.fromkeys(why_unsupported(dtype, channels, after) for after in kinds) if in_use() else {}
    return [f"sums with norms: plain MLX instead: {reason}" for reason in reasons if reason]


def why_unsupported(dtype: mx.Dtype, channels: int, after: bool) -> str | None:
    """Why the kernel is not used for rows of so many channels; None where it is. `after`: results are normed before they are added."""
    if channels > launcher.MOST_CHANNELS:
        return f"rows of {channels} channels are longer than {launcher.MOST_CHANNELS}"
    return _tried(dtype, channels, after)


@cache
def _tried(dtype: mx.Dtype, channels: int, after: bool) -> str | None:
    keys = mx.random.split(mx.random.key(channels), 4)
    result, stream = (mx.random.normal((_ROWS, channels), key=key).astype(dtype) for key in keys[:2])
    weights = [mx.random.normal((channels,), key=key).astype(dtype) for key in keys[2:]]
    norms: tuple[Norm | None, Norm] = ((weights[0], 1e-5) if after else None, (weights[1], 1e-6))
    try:
        for got, expected in zip(launcher.add_norm(result, stream, *norms), reference.add_norm(result, stream, *norms), strict=True):
            error = mx.abs(got.astype(mx.float32) - expected.astype(mx.float32)).max() / mx.abs(expected.astype(mx.float32)).max()
            if not float(error.item()) < _MOST_ERROR:  # type: ignore[arg-type]
                return f"sums with norms failed their trial: they differ from plain MLX by {float(error.item()):.2g}"  # type: ignore[arg-type]
    except (RuntimeError, ValueError) as error:
        return f"sums with norms failed their trial: {' '.join(str(error).split())[:200]}"
    return None
