"""top-k, top-p and min-p: which logits stay."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

from .. import kernels_cpu
from ..cache.attention.select import SWITCH
from ..device import is_gpu
from ..kernels_metal.sampling_threshold import reference
from ..types import SamplingParams
from .rows import PickedRows, column, values

_LEAST_LIMITS = 4
"""Rows of `Cuts.limits` at least: Metal passes smaller arrays in another address space."""
_TRIED = ((0, 0.9), (50, 0.8), (7, 1.0), (0, 0.3), (0, 1.0))
"""top_k (0: none) and top_p of the trial's rows."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """top-k, then top-p of what is left, and min-p: columns `[R, 1]`, switched off where they cut nothing."""

    top_k: mx.array | None
    """int32 `[rows, 1]`; None where no row has it."""
    top_p: mx.array | None
    """float32 `[rows, 1]`; None where no row has it."""
    log_min_p: mx.array | None
    """float32 `[rows, 1]`, the logarithm of min_p; None where no row has it."""
    limits: mx.array
    """float32 `[max(rows, 4), 2]`: top_k (vocab if there is none) and top_p of each row, for the Metal kernel."""

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
        """Those of some rows."""
        rows = picked.rows
        top_k, top_p, log_min_p = (None if c is None else c[rows] for c in (self.top_k, self.top_p, self.log_min_p))
        padded = picked.sequences + [0] * (_LEAST_LIMITS - len(picked.sequences))
        return Cuts(top_k, top_p, log_min_p, self.limits[mx.array(padded)])

    def threshold(self, logits: mx.array) -> mx.array:
        """The lowest of the logits `[R, vocab]` that stays in each row, `[R, 1]`: tokens tied at a cut stay together."""
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
        if _search_in_use() and why_unsupported(size) is None:
            from ..kernels_metal.sampling_threshold.launcher import threshold

            return threshold(logits, self.limits)
        return reference.threshold(logits, self.top_k, self.top_p)


def fallback_lines(size: int) -> list[str]:
    """Why vocabularies of this size are sorted on this GPU, if they are. Runs the trial."""
    reason = why_unsupported(size) if _search_in_use() else None
    return [f"top-k and top-p: sorting instead: {reason}"] if reason else []


def _search_in_use() -> bool:
    """Whether MLX computes on a GPU that runs the kernels."""
    if not is_gpu() or os.environ.get(SWITCH) == "0":
        return False
    from ..kernels_metal import executors

    return executors.available()


@cache
def why_unsupported(size: int) -> str | None:
    """Why rows of so many logits are sorted, though there are Metal kernels; None where these have passed their trial."""
    from ..kernels_metal.sampling_threshold.launcher import LEAST_LOGITS, MOST_LOGITS, threshold

    if not LEAST_LOGITS <= size <= MOST_LOGITS:
        return f"a vocabulary of {size} tokens is not one of {LEAST_LOGITS} to {MOST_LOGITS}"
    logits = mx.random.normal((len(_TRIED), size), key=mx.random.key(size)) * 3
    limits = mx.array([[k or size, p] for k, p in _TRIED], mx.float32)
    top_k, top_p = (limits[:, i : i + 1] for i in (0, 1))
    try:
        found = threshold(logits, limits)
        wrong = (logits < found) != (logits < reference.threshold(logits, top_k, top_p))
        most = int(wrong.astype(mx.int32).sum(axis=-1).max().item())  # type: ignore[arg-type]
    except (RuntimeError, ValueError) as error:
        return f"the search for top-k and top-p failed its trial: {' '.join(str(error).split())[:200]}"
    # A token whose place in the cumulated probability is top_p to the last bits may fall on either side.
    return None if most <= 1 + size // 2**15 else f"the search for top-k and top-p failed its trial: {most} logits are on the wrong side"
