"""Constants of a layer for the decode kernels, computed once: only its arrays change between steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import mlx.core as mx

from ...kernels_metal.append_rows.launcher import Norm, RowPart
from ...kernels_metal.paged_attention.arrays import nothing, sink_logits
from ...kernels_metal.paged_attention.tiles import Shape
from ...util.dataclass import dataclass
from ..base import AttentionParams, AttentionSpec, HeadNorm, HeadSteps, ValueSteps
from ..store import LayerStore


@dataclass(frozen=True, slots=True)
class DecodeLayer:
    """A layer with the arguments of `Step.attend_rows` that stay the same."""

    params: AttentionParams
    q_norm: HeadNorm | None
    k_norm: HeadNorm | None
    bias: mx.array | None
    values: ValueSteps | None
    widths: list[int]
    """Columns of each array of rows."""
    shape: Shape
    places: tuple[tuple[int, int], ...]
    """(index of the array of rows, first column) of queries, keys and values."""
    vectors: list[mx.array]
    """Bias and weights of both norms, as inputs of the kernel."""
    logits: mx.array
    """Sinks, as an input of the kernel."""
    kind: int
    """Equal for layers that differ only in their arrays."""

    def fits(self, widths: list[int], heads: HeadSteps, params: AttentionParams) -> bool:
        """True if these constants belong to these arguments."""
        norms = self.q_norm is heads.q_norm and self.k_norm is heads.k_norm and self.values is heads.values
        return norms and self.bias is heads.bias and self.params is params and self.widths == widths

    def parts(self, rows: Sequence[mx.array]) -> tuple[RowPart, RowPart, RowPart]:
        """Return queries, keys and values in the arrays of a step."""
        q, k, v = (RowPart(rows[i], at) for i, at in self.places)
        return q, k, v

    def inputs(self, rows: Sequence[mx.array]) -> list[mx.array]:
        """Return queries, keys and values as inputs of the kernel, with their bias and the weights of both norms."""
        (q, _), (k, _), (v, _) = self.places
        return [rows[q], rows[k], rows[v], *self.vectors]

    @property
    def norms(self) -> tuple[Norm | None, Norm | None]:
        """The norms, as arguments of launchers."""
        q_norm, k_norm = (None if norm is None else Norm(norm.weight, norm.eps) for norm in (self.q_norm, self.k_norm))
        return q_norm, k_norm

    @property
    def value_eps(self) -> float | None:
        """Epsilon of the norm of values; None without one."""
        return None if self.values is None else self.values.eps


def decode_layer(store: LayerStore, rows: Sequence[mx.array], heads: HeadSteps, params: AttentionParams) -> DecodeLayer:
    """Return the constants of a layer, cached in `store`; the other arguments are those of `Step.attend_rows`."""
    known, widths = store.kernels, [piece.shape[1] for piece in rows]
    if isinstance(known, DecodeLayer) and known.fits(widths, heads, params):
        return known
    made = store.kernels = _described_layer(store, widths, heads, params)
    return made


def shape_of(store: LayerStore, heads: int) -> Shape:
    """Return the shape of a layer with `heads` query heads."""
    spec, form = store.spec, store.format
    return Shape(store.dtype, heads, spec.kv_heads, spec.key_dim, spec.value_dim, form.k_bits, form.v_bits)


def _described_layer(store: LayerStore, widths: list[int], heads: HeadSteps, params: AttentionParams) -> DecodeLayer:
    count, places = _located_heads(widths, store.spec, from_keys=heads.values is not None and heads.values.from_keys)
    shape = shape_of(store, count)
    norms = (heads.q_norm, heads.k_norm)
    weights = [nothing(store.dtype) if norm is None else norm.weight for norm in norms]
    vectors = [nothing(store.dtype) if heads.bias is None else heads.bias, *weights]
    logits = sink_logits(params.sinks, store.dtype)
    mx.eval(logits)  # cached for all threads
    alike = [None if norm is None else (norm.eps, tuple(norm.weight.shape), norm.weight.dtype) for norm in norms]
    sinks = None if params.sinks is None else (tuple(params.sinks.shape), params.sinks.dtype)
    kind = (shape, places, tuple(widths), heads.bias is None, *alike, heads.values, params.scale, params.softcap, sinks)
    number = _kinds.get(kind)
    if number is None:
        number = _kinds.setdefault(kind, next(_numbers))
    return DecodeLayer(params, heads.q_norm, heads.k_norm, heads.bias, heads.values, widths, shape, places, vectors, logits, number)


_kinds: dict[tuple[object, ...], int] = {}
_numbers = count()


def _located_heads(widths: Sequence[int], spec: AttentionSpec, *, from_keys: bool) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return the number of query heads in arrays of these widths, and `DecodeLayer.places`. With `from_keys`, values are the keys."""
    keys, values = spec.kv_heads * spec.key_dim, 0 if from_keys else spec.kv_heads * spec.value_dim
    queries = sum(widths) - keys - values
    places: list[tuple[int, int]] = []
    left = [queries, keys, values]
    for i, width in enumerate(widths):
        at = 0
        while at < width:
            places.append((i, at))
            at += left.pop(0)
    return queries // spec.key_dim, (*places, places[-1]) if from_keys else tuple(places)
