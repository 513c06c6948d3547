"""Figures with standard errors, from the scores of positions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its uncertainty."""

    mean: float
    """Mean over all positions."""
    stderr: float | None
    """Standard error, from the means of windows, because positions of one text correlate; None for a single window."""


def estimate(values: NDArray[Any], window: NDArray[np.int32]) -> Estimate:
    """Return the mean of `values` [positions] without NaN; `window` [positions] is the window of each."""
    known = ~np.isnan(values)
    values, window = values[known].astype(np.float64), window[known]
    counts = np.bincount(window)
    sums, counts = np.bincount(window, values)[counts > 0], counts[counts > 0]
    if not counts.size:
        return Estimate(math.nan, None)
    mean, blocks = float(sums.sum() / counts.sum()), len(counts)
    if blocks < 2:
        return Estimate(mean, None)
    squares = float(np.square(sums - counts * mean).sum())
    return Estimate(mean, math.sqrt(squares * blocks / (blocks - 1)) / float(counts.sum()))


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of a model at each position of the windows."""

    window: NDArray[np.int32]
    """Number of the window [positions]."""
    surprise: Numbers
    """Minus the log-probability of the token that follows, in nats [positions]; NaN after the last one of a window."""
    kl: Numbers | None = None
    """KL divergence from the teacher in nats [positions]; None without a teacher."""
    same: NDArray[np.bool_] | None = None
    """True if the most likely token is the teacher's [positions]; None without a teacher."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Loss of a model, or its fit to a text. Names are those of the JSON output; errors are standard errors."""

    model: str
    """The model's name."""
    nbytes: int
    """Bytes of its tensors on disk."""
    bpw: float
    """Bits on disk per weight."""
    positions: int
    """Positions compared."""
    windows: int
    """Windows with these positions, each read from its beginning."""
    ppl: float
    """Perplexity of the text."""
    ppl_stderr: float | None
    """Standard error of the perplexity."""
    kl_mean: float | None = None
    """Mean KL divergence from the teacher in nats."""
    kl_stderr: float | None = None
    """Standard error of that mean."""
    kl_p99: float | None = None
    """99 % of the positions have a smaller KL divergence."""
    kl_max: float | None = None
    """The largest KL divergence of a position."""
    top1: float | None = None
    """Share of positions with the teacher's most likely token, 0 to 1."""
    top1_stderr: float | None = None
    """Standard error of that share."""
    ppl_ratio: float | None = None
    """Perplexity over the teacher's."""
    ppl_ratio_stderr: float | None = None
    """Standard error of that ratio, from pairs of positions."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Two models compared at the same positions. The errors are smaller than each model's own: hard positions are hard for both."""

    model: str
    """Name of the model."""
    against: str
    """Name of the model that it is compared with."""
    kl_mean: float
    """Difference of the mean KL divergences, in nats."""
    kl_stderr: float | None
    """Standard error of that difference."""
    top1: float
    """Difference of the shares of equal most likely tokens."""
    top1_stderr: float | None
    """Standard error of that difference."""


def figures(model: str, size: tuple[int, int], scores: Scores, teacher: Scores | None = None) -> Figures:
    """Return the figures of a model of `size` (bytes on disk, weights)."""
    surprise, (nbytes, weights) = estimate(scores.surprise, scores.window), size
    ppl, windows = math.exp(surprise.mean), len(np.unique(scores.window))
    found = Figures(model, nbytes, nbytes * 8 / max(weights, 1), len(scores.window), windows, ppl, _scaled(surprise.stderr, ppl))
    if scores.kl is None or scores.same is None:
        return found
    kl, top1 = estimate(scores.kl, scores.window), estimate(scores.same.astype(np.float64), scores.window)
    compared: dict[str, Any] = {
        "kl_mean": max(kl.mean, 0.0),
        "kl_stderr": kl.stderr,
        "kl_p99": max(float(np.percentile(scores.kl, 99)), 0.0),
        "kl_max": max(float(scores.kl.max()), 0.0),
        "top1": top1.mean,
        "top1_stderr": top1.stderr,
    }
    if teacher is not None:
        growth = estimate(scores.surprise - teacher.surprise, scores.window)
        ratio = math.exp(growth.mean)
        compared |= {"ppl_ratio": ratio, "ppl_ratio_stderr": _scaled(growth.stderr, ratio)}
    return replace(found, **compared)


def difference(model: str, scores: Scores, against: str, other: Scores) -> Difference:
    """Compare two models that were scored on the same windows with the same teacher."""
    assert scores.kl is not None
    assert other.kl is not None
    assert scores.same is not None
    assert other.same is not None
    kl = estimate(scores.kl - other.kl, scores.window)
    top1 = estimate(scores.same.astype(np.float64) - other.same, scores.window)
    return Difference(model, against, kl.mean, kl.stderr, top1.mean, top1.stderr)


def _scaled(stderr: float | None, factor: float) -> float | None:
    return None if stderr is None else stderr * factor
