"""What fewer bits of cached keys and values lose: of all layers together, and of the keys and values of one layer at a time."""

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
from .measure import Reading, Source, Tell, open_model, windows_of
from .probabilities import kl_divergence, logprobs_of
from .texts import Window, Windows

FORMATS = ("8", "k8v4", "k6v4", "k5v4", "4", "3", "2")
"""Formats that are tried for all layers, from the most bits to the fewest."""
LAYER_BITS = (8, 4, 3)
"""Bits that are tried for the keys, and for the values, of one layer."""
LENGTH = 512
"""Tokens of a window: a page of 64 is kept as it is until it is full, so short ones would show nothing."""
POSITIONS = 2_048
"""Positions that are compared unless something else is asked for: each is read once with every format."""
LAYER_POSITIONS = 1_024
"""Positions of the comparison layer by layer, which reads them once for each layer, kind and number of bits."""
_OPEN = 64


@dataclass(frozen=True, slots=True)
class KVLoss:
    """What one setting loses against a cache of 16 bits. The names are those of the JSON output; errors are standard errors."""

    kv: str
    """The format, as `--kv` takes it."""
    kl_mean: float
    """Mean KL divergence in nats."""
    kl_stderr: float | None
    """Standard error of that mean."""
    kl_p99: float
    """99 % of the positions have a smaller KL divergence."""
    top1: float
    """Share of positions with the same likeliest token, 0 to 1."""
    top1_stderr: float | None
    """Standard error of that share."""
    layer: int | None = None
    """The only layer that has the format; None: all have it."""


@dataclass(frozen=True, slots=True)
class KVEvaluation:
    """What was measured of one model's cache."""

    model: str
    """The model's name."""
    formats: tuple[KVLoss, ...]
    """All layers in one format."""
    layers: tuple[KVLoss, ...]
    """One layer at a time: its keys in few bits, then its values."""
    auto: str
    """The smallest format within the limit: what `--kv auto` uses."""
    kl_auto: float
    """Its mean KL divergence."""
    positions: int
    """Positions compared, after the first page of each window."""


def evaluate_kv(
    model: str | Path, reading: Reading, limit: float, *, layers: bool = False, tell: Tell | None = None
) -> tuple[KVEvaluation, Windows]:
    """Measure each format, and with `layers` each layer's keys and values alone, which takes several times as long. `limit` is the mean KL
    divergence in nats that `auto` may have. `tell` is told how many windows have been read, of how many in all. Raises `MLXInferError`,
    `EvaluationError` for models with a cache of their own."""
    source = Source.of(model)
    windows, _ = windows_of(source, reading)
    short = Windows(_first(windows, LAYER_POSITIONS), windows.name)
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
        formats, found = [_formats(llm, each, tried, read) for each, tried in turns] + ([] if layers else [()])
    auto, kl = choose(formats, limit)
    return KVEvaluation(source.name, formats, found, auto, kl, _compared(windows)), windows


def choose(formats: Sequence[KVLoss], limit: float) -> tuple[str, float]:
    """The format of fewest bits whose mean KL divergence is at most `limit`, and that; 16 bits where none is."""
    good = [each for each in formats if each.kl_mean <= limit]
    best = min(good, key=lambda each: (_bits(each.kv), each.kl_mean), default=None)
    return (best.kv, best.kl_mean) if best else ("16", 0.0)


def _bits(kv: str) -> int:
    form = KVFormat.parse(kv)
    return form.k_bits + form.v_bits


def _first(windows: Windows, positions: int) -> tuple[Window, ...]:
    chosen, count = [], 0
    for window in windows.windows:
        if count >= positions:
            break
        chosen.append(window)
        count += len(window.ids)
    return tuple(chosen)


def _compared(windows: Windows) -> int:
    return sum(len(window.ids) - _OPEN for window in windows.windows)


_Tried = list[tuple[KVFormat, Union[int, None]]]
"""Formats, and the only layer that has each; None: all layers."""


class _Counted:
    """Counts windows that have been read. All take about as long: what is left can be computed from the first."""

    def __init__(self, tell: Tell | None, model: str, total: int) -> None:
        self._tell, self._what, self._done, self._total = tell, f"reading {model} with each format", 0, total

    def __call__(self) -> None:
        self._done += 1
        if self._tell:
            self._tell(self._what, self._done, self._total)


def _formats(llm: LLM, windows: Windows, tried: _Tried, read: Callable[[], None]) -> tuple[KVLoss, ...]:
    """Each window is read once with 16 bits, then with each setting."""
    positions, graph = _compared(windows), llm.loaded.model
    kl, same = np.zeros((len(tried), positions)), np.zeros((len(tried), positions), np.bool_)
    number, first = np.zeros(positions, np.int32), 0
    for index, window in enumerate(windows.windows):
        exact = _read(graph, llm.dtype, window.ids, KVFormat(), None)
        read()
        rows = slice(first, first + exact.shape[0])
        number[rows] = index
        for turn, (form, layer) in enumerate(tried):
            other = _read(graph, llm.dtype, window.ids, form, layer)
            kl[turn, rows] = np.array(kl_divergence(exact, other))
            same[turn, rows] = np.array(mx.argmax(exact, axis=-1) == mx.argmax(other, axis=-1))
            read()
        first = rows.stop
    scores = [Scores(number, np.zeros(positions), each, agree) for each, agree in zip(kl, same, strict=True)]
    return tuple(_loss(form, layer, each) for (form, layer), each in zip(tried, scores, strict=True))


def _read(graph: Model, dtype: mx.Dtype, ids: Sequence[int], form: KVFormat, layer: int | None) -> mx.array:
    """float32 log-probabilities `[positions after the first page, vocab]`, evaluated."""
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
