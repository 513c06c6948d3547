"""Thresholds of top-k, top-p and min-p."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from .. import kernels_cpu
from ..kernels_metal.kernel_speed import Step, compare
from ..kernels_metal.kernel_trial import KernelTrial, Speeds, choice_line, kernels_in_use, unless_slower
from ..kernels_metal.sampling_threshold import launcher, reference
from ..types import SamplingParams
from ..util.dataclass import dataclass
from .rows import PickedRows, column, values

_LEAST_LIMITS = 4
"""Least rows of `Cuts.limits`: Metal passes smaller arrays in another address space."""
_TRIED = ((0, 0.9), (50, 0.8), (7, 1.0), (0, 0.3), (0, 1.0))
"""top_k (0: none) and top_p of the trial's rows."""
_ROUNDING = 1e-3
"""Maximum probability of the tokens that rounding may keep or cut."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """top-k, then top-p of the remaining tokens, and min-p: columns `[R, 1]`, neutral in rows without them."""

    top_k: mx.array | None
    """int32 `[R, 1]`; None if no row has top-k."""
    top_p: mx.array | None
    """float32 `[R, 1]`; None if no row has top-p."""
    log_min_p: mx.array | None
    """float32 `[R, 1]`, the logarithm of min_p; None if no row has min-p."""
    limits: mx.array
    """float32 `[max(R, 4), 2]`: top_k (vocab without top-k) and top_p of each row, for the Metal kernel."""

    @staticmethod
    def of(params: Sequence[SamplingParams], vocab_size: int) -> Cuts | None:
        ks = [k if k > 0 else vocab_size for k in values(params, "top_k")]
        top_k = column([min(k, vocab_size) for k in ks]) if any(k < vocab_size for k in ks) else None
        top_ps, min_ps = values(params, "top_p"), values(params, "min_p")
        top_p = column(top_ps) if any(p < 1 for p in top_ps) else None
        min_p = column([np.log(p) if p > 0 else -np.inf for p in min_ps]) if any(p > 0 for p in min_ps) else None
        limits = np.array([[min(k, vocab_size), p] for k, p in zip(ks, top_ps, strict=True)], np.float32)
        limits = np.pad(limits, ((0, max(_LEAST_LIMITS - len(limits), 0)), (0, 0)))
        return None if top_k is None and top_p is None and min_p is None else Cuts(top_k, top_p, min_p, mx.array(limits))

    def pick(self, picked: PickedRows) -> Cuts:
        """The cuts of some rows."""
        rows = picked.rows
        top_k, top_p, log_min_p = (None if c is None else c[rows] for c in (self.top_k, self.top_p, self.log_min_p))
        padded = picked.sequences + [0] * (_LEAST_LIMITS - len(picked.sequences))
        return Cuts(top_k, top_p, log_min_p, self.limits[mx.array(padded)])

    def threshold(self, logits: mx.array) -> mx.array:
        """Lowest kept logit of each row of `[R, vocab]`, `[R, 1]`. Tokens tied at a cut are kept together."""
        cut = self.top_k is not None or self.top_p is not None
        if self.log_min_p is None:
            return self._of_probability(logits)
        lowest = mx.max(logits, axis=-1, keepdims=True) + self.log_min_p
        return mx.maximum(lowest, self._of_probability(logits)) if cut else lowest

    def _of_probability(self, logits: mx.array) -> mx.array:
        rows, size = logits.shape
        if kernels_cpu.in_use():
            top_k = mx.full((rows,), size) if self.top_k is None else self.top_k[:, 0]
            top_p = mx.ones((rows,)) if self.top_p is None else self.top_p[:, 0]
            return kernels_cpu.threshold(logits, top_k, top_p)[:, None]
        if kernels_in_use() and TRIAL.obstacle(size) is None:
            return launcher.threshold(logits, self.limits)
        return reference.threshold(logits, self.top_k, self.top_p)


def fallback_lines(size: int) -> list[str]:
    """Reasons why a GPU sorts vocabularies of this size, if it does. Runs the trial."""
    return TRIAL.lines([(size,)]) if kernels_in_use() and size >= launcher.LEAST_LOGITS else []


def _check_threshold(size: int) -> str | None:
    logits = mx.random.normal((len(_TRIED), size), key=mx.random.key(size)) * 3
    limits = mx.array([[k or size, p] for k, p in _TRIED], mx.float32)
    expected = reference.threshold(logits, limits[:, :1], limits[:, 1:])
    wrong = (logits < launcher.threshold(logits, limits)) != (logits < expected)
    # Where the cumulated probability equals top_p up to rounding, tokens may fall on either side: in a large vocabulary, dozens.
    count, mass = wrong.astype(mx.int32).sum(axis=-1), mx.where(wrong, mx.softmax(logits, axis=-1), 0).sum(axis=-1)
    faulty = (count > 1) & ((mass > _ROUNDING) | (limits[:, 1] == 1))
    most = int(mx.where(faulty, count, 0).max().item())  # type: ignore[arg-type]
    return f"{most} logits are on the wrong side" if most else None


def _speeds(size: int) -> Speeds:
    """Compare thresholds of one row, each of which changes the next one's logits."""
    logits, limits = mx.random.normal((1, size), key=mx.random.key(size)) * 3, mx.array([[50.0, 0.9]] * _LEAST_LIMITS)
    top_k, top_p = limits[:1, :1], limits[:1, 1:]
    mx.eval(logits, limits, top_k, top_p)

    def by(threshold: Callable[..., mx.array], *cuts: mx.array) -> Step:
        return lambda x, _: mx.maximum(x, threshold(x, *cuts) - 1)

    return {1: compare(by(launcher.threshold, limits), by(reference.threshold, top_k, top_p), logits)}


TRIAL = KernelTrial(
    "top-k and top-p",
    _check_threshold,
    speeds=_speeds,
    choose=unless_slower,
    describe=lambda kind, verdict: f" of {kind[0]} logits: {choice_line(verdict)}",
)
"""By size of the vocabulary."""
