"""Trials of the attention kernels for a kind of layer: every variant that such a layer can reach, compared with plain MLX.

Decode and prefill have trials of their own, so that a prefill kernel that fails leaves the others in use. On a GPU, decode's kernel is also
compared with MLX's attention in speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import mlx.core as mx

from ...kernels_metal.kernel_trial import KernelTrial, Verdict, choice_line, difference
from ..base import PAGE, AttentionParams, AttentionSpec, HeadSteps, Segment, ValueSteps
from ..kv_format import KVFormat
from ..pages import AttentionGroup, PageTable
from ..store import LayerStore
from . import decode_choice
from .native import AttentionBackend, SharedAttention
from .reference import PlainAttention

Kind = tuple[AttentionSpec, mx.Dtype, KVFormat]
"""Spec of a small layer, dtype and format: layers of one kind compile the same variants of the kernels."""

Steps = tuple[tuple[tuple[int, int], ...], ...]

_STEPS: Steps = (
    ((0, 299), (1, 20)),
    *(parts for rows in (1, 2, 3, 8) for parts in (((0, rows), (1, rows)), ((1, rows),))),
    ((1, 12), (0, 2)),
    ((0, 5), (1, 4)),
    ((0, 1), (1, 1)),
)
"""(sequence, tokens) of the segments of each step of decode's trial. Only the first sequence has enough pages to divide among work items.
Each number of rows that the kernels are compiled for is tried with both sequences. The prompt fills pages of the first sequence. Later, a
step of few rows fills a page of each; the first sequence's is not its first page, which some formats keep in 16 bits.
"""
_PROMPTS: Steps = (((0, 130), (1, 20)), ((0, 270),), ((1, 12), (0, 20)))
"""Those of the trials of prompts: pages become full and are read sealed, by few enough rows for the kernel and by enough to unseal."""
_WINDOW = 250
"""Represents all windows longer than a page: it ends within the first sequence, whose pages are still divided."""
_MOST_ERROR, _MEAN_ERROR = 0.1, 0.01
"""Bounds of `difference`."""


def kind_of(spec: AttentionSpec, dtype: mx.Dtype, form: KVFormat) -> Kind:
    """Return the kind of a layer. The kernels depend on the query heads per KV head, not on the number of KV heads. Spans are
    plain MLX's."""
    heads = (spec.query_heads or spec.kv_heads) // spec.kv_heads
    window = _WINDOW if spec.window is not None and spec.window > PAGE + 1 else spec.window
    return replace(spec, kv_heads=2, query_heads=2 * heads, window=window, sees_spans=False), dtype, form


def _check_decode(*kind: Any) -> str | None:
    from .metal import MetalAttention

    return _fault(MetalAttention("not a part of this trial", unseals=False), kind, _STEPS)


def _check_prefill(*kind: Any) -> str | None:
    from .metal import MetalAttention

    return _fault(MetalAttention(), kind, _PROMPTS)


def _check_unsealing(*kind: Any) -> str | None:
    from .metal import MetalAttention

    return _fault(MetalAttention("not a part of this trial"), kind, _PROMPTS)


def _fault(backend: AttentionBackend, kind: Any, steps: Steps) -> str | None:
    for got, expected in zip(_answers(backend, kind, steps), _answers(PlainAttention(), kind, steps), strict=True):
        if error := difference(got, expected, _MOST_ERROR, _MEAN_ERROR):
            return f"answers {error}"
    return None


def _describe(kind: Any, verdict: Verdict) -> str:
    spec, dtype, form = kind
    heads = f"{spec.query_heads // spec.kv_heads} heads of {spec.key_dim} per KV head" + (" in a window" if spec.window else "")
    return f", {heads}, kv {form.name}, {str(dtype).rpartition('.')[2]}: {choice_line(verdict)}"


DECODE_TRIAL = KernelTrial(
    "attention",
    _check_decode,
    speeds=decode_choice.speeds,
    choose=decode_choice.choose,
    describe=_describe,
    failure="the Metal kernels failed their trial",
    listed=False,
)
"""By `Kind`: all that a layer needs for segments of few rows. Without these kernels a layer uses plain MLX alone."""
PREFILL_TRIAL = KernelTrial("attention of prompts", _check_prefill, failure="the prefill kernel failed its trial", listed=False)
"""By `Kind`, for quantized pages: the kernels for segments of many rows."""
UNSEAL_TRIAL = KernelTrial("unsealing", _check_unsealing, failure="the kernel that unseals pages failed its trial", listed=False)
"""By `Kind`, for quantized pages without a prefill kernel: MLX's attention on unsealed pages."""


TRIALS = DECODE_TRIAL, PREFILL_TRIAL, UNSEAL_TRIAL


def forget_trials() -> None:
    """Remove all verdicts on attention kernels."""
    for trial in TRIALS:
        trial.forget()


def _answers(backend: AttentionBackend, kind: Kind, steps: Steps) -> Iterator[mx.array]:
    """Yield the answers of all steps of two layers, flat, float32. The first has neither sinks nor a soft cap, and its heads are ready. The
    second has both; its heads get a bias, are normed and rotate. If other layers read its pages, queries are answered again from them."""
    spec, dtype, form = kind
    group = AttentionGroup(spec.window, 8, first=form.first16)
    group.tables.update({0: PageTable(), 1: PageTable()})
    layers = [(LayerStore(spec, dtype, form), params) for params in _params(spec, dtype)]
    found: list[list[mx.array]] = [[] for _ in layers]
    for store, _ in layers:
        store.grow(slots=2)
    past = [0, 0]
    for number, parts in enumerate(steps):
        segments = _segments(parts, past)
        qkv = _random_qkv(spec, dtype, sum(s.count for s in segments), seed=number)
        step = backend.begin(segments, group)
        (store, params), (other, more) = layers
        rows = mx.concatenate([x.reshape(x.shape[0], -1) for x in qkv], axis=1)
        heads = _head_steps(spec, dtype, segments)
        answers = [step.heads(store, qkv, params), step.rows(other, [rows], heads, more)]
        if spec.shared:
            y = cast("SharedAttention", step).again(other, qkv[0].reshape(len(rows), -1), replace(heads, bias=None), more)
            found[1].append(y.astype(mx.float32).reshape(-1))
        mx.eval(
            [y for y, _ in answers],
            found[1][-1:],
            [f.arrays for _, full in answers for f in full.values()],
            [store.arrays for store, _ in layers],
        )
        for s in segments:
            pages = group.extend(group.tables[s.slot], s.filled) if s.filled else []
            for (store, _), (_, full) in zip(layers, answers, strict=True):
                if pages:
                    store.grow(pages=8, first=2)
                    store.seal(pages, full[s.slot])
        for each, (y, _) in zip(found, answers, strict=True):
            each.append(y.astype(mx.float32).reshape(-1))
    return map(mx.concatenate, found)


def _params(spec: AttentionSpec, dtype: mx.Dtype) -> tuple[AttentionParams, AttentionParams]:
    scale = spec.key_dim**-0.5
    sinks = mx.linspace(0.0, 2.0, spec.query_heads).astype(dtype)
    return AttentionParams(scale), AttentionParams(scale, softcap=5.0, sinks=sinks)


class _Norm:
    """`HeadNorm` with weights between 0.5 and 1.5."""

    eps = 1e-5

    def __init__(self, dim: int, dtype: mx.Dtype) -> None:
        self.weight = mx.linspace(0.5, 1.5, dim).astype(dtype)

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = mx.fast.rms_norm(x, self.weight, self.eps)
        return y


class _HalfRotation:
    """`Rotation` of the first half of each head."""

    def __init__(self, segments: Sequence[Segment], dim: int) -> None:
        frequencies = [0.5 ** (i + 1) for i in range(dim // 4)]
        self.parts = [(frequencies, s.past, s.count) for s in segments]
        positions = mx.array([p for s in segments for p in range(s.past, s.past + s.count)], mx.float32)
        angles = positions[:, None] * mx.array(frequencies)
        self.waves = mx.stack([mx.cos(angles), mx.sin(angles)], axis=1)

    def __call__(self, x: mx.array) -> mx.array:
        half, cosines, sines = self.waves.shape[2], self.waves[:, :1], self.waves[:, 1:]
        low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return mx.concatenate([low * cosines - high * sines, high * cosines + low * sines, rest], axis=-1).astype(x.dtype)


def _head_steps(spec: AttentionSpec, dtype: mx.Dtype, segments: Sequence[Segment]) -> HeadSteps:
    norm = _Norm(spec.key_dim, dtype)
    width = (spec.query_heads + spec.kv_heads) * spec.key_dim + spec.kv_heads * spec.value_dim
    bias = mx.linspace(-1.0, 1.0, width).astype(dtype)
    return HeadSteps(norm, norm, _HalfRotation(segments, spec.key_dim), bias, ValueSteps(norm.eps))


def _segments(parts: Sequence[tuple[int, int]], past: list[int]) -> tuple[Segment, ...]:
    """Return the segments of a step, and add their tokens to `past`, those of each sequence."""
    segments, start = [], 0
    for slot, count in parts:
        segments.append(Segment(slot, start, count, past[slot], 0))
        past[slot] += count
        start += count
    return tuple(segments)


def _random_qkv(spec: AttentionSpec, dtype: mx.Dtype, rows: int, seed: int) -> tuple[mx.array, mx.array, mx.array]:
    """Return queries, keys and values of a step."""
    sizes = ((spec.query_heads, spec.key_dim), (spec.kv_heads, spec.key_dim), (spec.kv_heads, spec.value_dim))
    keys = mx.random.split(mx.random.key(seed), 3)
    q, k, v = (mx.random.normal((rows, *size), key=key).astype(dtype) for size, key in zip(sizes, keys, strict=True))
    return q, k, v
