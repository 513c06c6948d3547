"""Loss of a quantized cache: all layers together, or the keys or values of one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Union

import mlx.core as mx
import numpy as np

from ..cache.base import AttentionSpec, Segment
from ..cache.kv_format import KVFormat
from ..cache.paged import PagedCache
from ..engine.llm import LLM
from ..errors import EvaluationError
from ..models import Model
from .figures import Scores, estimate
from .measure import EvaluatedModel, Reading, Tell, open_model, windows_of
from .probabilities import kl_divergence, logprobs_of
from .texts import Window, Windows

FORMATS = ("8", "k8v4", "k6v4", "k5v4", "4", "3", "2")
"""Formats tried for all layers, most bits first."""
LAYER_BITS = (8, 4, 3)
"""Bits tried for the keys and for the values of one layer."""
LENGTH = 512
"""Tokens of a window. A page of 64 is quantized only when it is full, so short windows would show nothing."""
POSITIONS = 2_048
"""Default number of positions. Each is read once per format."""
LAYER_POSITIONS = 1_024
"""Positions of the comparison by layer, each read once per layer, kind and number of bits."""
_OPEN = 64


@dataclass(frozen=True, slots=True)
class KVLoss:
    """Loss of one setting against a cache of 16 bits. Names are those of the JSON output; errors are standard errors."""

    kv: str
    """The format, as `--kv` takes it."""
    kl_mean: float
    """Mean KL divergence in nats."""
    kl_stderr: float | None
    """Standard error of that mean."""
    kl_p99: float
    """99 % of the positions have a smaller KL divergence."""
    top1: float
    """Share of positions with the same most likely token, 0 to 1."""
    top1_stderr: float | None
    """Standard error of that share."""
    layer: int | None = None
    """The only layer with the format; None for all layers."""


@dataclass(frozen=True, slots=True)
class KVEvaluation:
    """Measurements of one model's cache."""

    model: str
    """The model's name."""
    formats: tuple[KVLoss, ...]
    """Losses with all layers in one format."""
    layers: tuple[KVLoss, ...]
    """Losses with one layer's keys, then values, in few bits."""
    auto: str
    """The format with fewest bits within the limit, which `--kv auto` uses."""
    kl_auto: float
    """Mean KL divergence of `auto`, in nats."""
    positions: int
    """Positions compared, after the first page of each window."""


def evaluate_kv(
    model: str | Path, reading: Reading, limit: float, *, layers: bool = False, tell: Tell | None = None
) -> tuple[KVEvaluation, Windows]:
    """Measure each format; with `layers` also each layer's keys and values alone, which takes several times as long.

    `limit` is the largest mean KL divergence of `auto`, in nats. `tell` gets the number of windows read and of all. Raises `MLXInferError`,
    and `EvaluationError` for models with a cache of their own.
    """
    source = EvaluatedModel.of(model)
    windows, _ = windows_of(source, reading)
    short = Windows(_first_windows(windows, LAYER_POSITIONS), windows.name)
    with open_model(source, windows, reading.settings) as llm:
        graph = llm.loaded.model
        kept = [index for index, spec in enumerate(graph.layers) if isinstance(spec, AttentionSpec)]
        if not kept or any(len(window.ids) <= _OPEN for window in windows.windows):
            why = "its texts are shorter than a page of 64 tokens" if kept else "this model's cache is its own, and is never quantized"
            raise EvaluationError(f"nothing to measure for {source.name}: {why}")
        every: _Tried = [(KVFormat.parse(name), None) for name in FORMATS]
        single: _Tried = [(each, layer) for layer in kept for bits in LAYER_BITS for each in (KVFormat(bits, 16), KVFormat(16, bits))]
        turns = [(windows, every), (short, single)][: 2 if layers else 1]
        read = _Counted(tell, source.name, sum(len(each.windows) * (len(tried) + 1) for each, tried in turns))
        formats, found = [_measure_formats(llm, each, tried, read) for each, tried in turns] + ([] if layers else [()])
    auto, kl = choose(formats, limit)
    return KVEvaluation(source.name, formats, found, auto, kl, _positions_compared(windows)), windows


def choose(formats: Sequence[KVLoss], limit: float) -> tuple[str, float]:
    """Return the format with fewest bits whose mean KL divergence is at most `limit`, and that divergence; 16 bits if there is none."""
    good = [each for each in formats if each.kl_mean <= limit]
    best = min(good, key=lambda each: (_bits(each.kv), each.kl_mean), default=None)
    return (best.kv, best.kl_mean) if best else ("16", 0.0)


def _bits(kv: str) -> int:
    form = KVFormat.parse(kv)
    return form.k_bits + form.v_bits


def _first_windows(windows: Windows, positions: int) -> tuple[Window, ...]:
    chosen, count = [], 0
    for window in windows.windows:
        if count >= positions:
            break
        chosen.append(window)
        count += len(window.ids)
    return tuple(chosen)


def _positions_compared(windows: Windows) -> int:
    return sum(len(window.ids) - _OPEN for window in windows.windows)


_Tried = list[tuple[KVFormat, Union[int, None]]]
"""Formats, each with the only layer that has it, or None for all layers."""


class _Counted:
    """Counts the windows read. All take about the same time, so the rest can be estimated from the first."""

    def __init__(self, tell: Tell | None, model: str, total: int) -> None:
        self._tell, self._what, self._done, self._total = tell, f"reading {model} with each format", 0, total

    def __call__(self) -> None:
        self._done += 1
        if self._tell:
            self._tell(self._what, self._done, self._total)


def _measure_formats(llm: LLM, windows: Windows, tried: _Tried, read: Callable[[], None]) -> tuple[KVLoss, ...]:
    """Read each window with 16 bits, then with each setting."""
    positions, graph = _positions_compared(windows), llm.loaded.model
    kl, same = np.zeros((len(tried), positions)), np.zeros((len(tried), positions), np.bool_)
    number, first = np.zeros(positions, np.int32), 0
    for index, window in enumerate(windows.windows):
        exact = _logprobs_with(graph, llm.dtype, window.ids, KVFormat(), None)
        read()
        rows = slice(first, first + exact.shape[0])
        number[rows] = index
        for turn, (form, layer) in enumerate(tried):
            other = _logprobs_with(graph, llm.dtype, window.ids, form, layer)
            kl[turn, rows] = np.array(kl_divergence(exact, other))
            same[turn, rows] = np.array(mx.argmax(exact, axis=-1) == mx.argmax(other, axis=-1))
            read()
        first = rows.stop
    scores = [Scores(number, np.zeros(positions), each, agree) for each, agree in zip(kl, same, strict=True)]
    return tuple(_loss(form, layer, each) for (form, layer), each in zip(tried, scores, strict=True))


def _logprobs_with(graph: Model, dtype: mx.Dtype, ids: Sequence[int], form: KVFormat, layer: int | None) -> mx.array:
    """Return float32 log-probabilities `[positions after the first page, vocab]`, evaluated."""
    formats = {} if layer is None else {layer: form}
    room = len(ids) + _OPEN
    cache = PagedCache(
        graph.layers, dtype=dtype, kv_cache_tokens=room, chunk=len(ids), kv=form if layer is None else None, layer_kv=formats
    )
    step = cache.begin([Segment(cache.open(), 0, len(ids), 0, len(ids))])
    hidden = graph.hidden(mx.array(list(ids), mx.int32), step)
    return logprobs_of(graph.logits(hidden[_OPEN:]))


def _loss(form: KVFormat, layer: int | None, scores: Scores) -> KVLoss:
    assert scores.kl is not None
    assert scores.same is not None
    kl, top1 = estimate(scores.kl, scores.window), estimate(scores.same.astype(np.float64), scores.window)
    high = max(float(np.percentile(scores.kl, 99)), 0.0)
    return KVLoss(form.name, max(kl.mean, 0.0), kl.stderr, high, top1.mean, top1.stderr, layer)
