"""Hooks that change activations: steering, patching and ablation. The model itself stays unchanged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Union

import mlx.core as mx

from ..cache.base import AttentionParams, AttentionSpec, Segment
from ..errors import SettingError
from ..models.decoder import Decoder, Model
from ..models.hooks import HEADS, RESIDUAL, Hooks
from ..util.dataclass import dataclass
from .places import Layers, checked_heads, checked_layers, native, place_to_change

if TYPE_CHECKING:
    from .trace import Trace

Positions = Union[int, Iterable[int], Mapping[int, int], None]
"""Positions of tokens in their sequence; for patches also a mapping to positions of the source. None: all."""


class Intervention:
    """A hook that replaces values at one place of some layers. Implements `models.hooks.Hooks`."""

    def __init__(self, place: str, layers: Iterable[int]) -> None:
        self.place, self.layers = place, frozenset(layers)

    def wants(self, place: str, layer: int) -> bool:
        return place == self.place and layer in self.layers

    def at(self, place: str, layer: int, x: mx.array, segments: Sequence[Segment]) -> mx.array:
        raise NotImplementedError

    def attended(
        self, layer: int, qkv: Sequence[mx.array], params: AttentionParams, spec: AttentionSpec, segments: Sequence[Segment]
    ) -> None:
        pass

    def arrays(self) -> list[mx.array]:
        return []


@dataclass(slots=True)
class Chain:
    """Several hooks as one: each receives the result of the one before. Implements `models.hooks.Hooks`."""

    links: tuple[Hooks, ...]

    def wants(self, place: str, layer: int) -> bool:
        return any(hooks.wants(place, layer) for hooks in self.links)

    def at(self, place: str, layer: int, x: mx.array, segments: Sequence[Segment]) -> mx.array:
        for hooks in self.links:
            if hooks.wants(place, layer):
                x = hooks.at(place, layer, x, segments)
        return x

    def attended(
        self, layer: int, qkv: Sequence[mx.array], params: AttentionParams, spec: AttentionSpec, segments: Sequence[Segment]
    ) -> None:
        for hooks in self.links:
            hooks.attended(layer, qkv, params, spec, segments)

    def arrays(self) -> list[mx.array]:
        return [array for hooks in self.links for array in hooks.arrays()]


class _Steering(Intervention):
    def __init__(self, layers: Iterable[int], added: mx.array, positions: frozenset[int] | None) -> None:
        super().__init__(RESIDUAL, layers)
        mx.eval(added)
        self._added, self._positions = added, positions

    def at(self, place: str, layer: int, x: mx.array, segments: Sequence[Segment]) -> mx.array:
        y = (x.astype(mx.float32) + self._added).astype(x.dtype)
        return y if self._positions is None else _where(_mask_of(segments, self._positions), y, x)


class _Replacement(Intervention):
    """Replaces rows by rows of `values`, in some heads or all. `positions`: from positions in the sequence to rows of `values`."""

    def __init__(
        self,
        place: str,
        values: Mapping[int, mx.array],
        positions: Mapping[int, int] | None,
        heads: tuple[int, ...] | None,
    ) -> None:
        super().__init__(place, values)
        mx.eval(list(values.values()))  # the thread that computes with them has another stream
        self._values, self._positions, self._heads = values, positions, heads

    def at(self, place: str, layer: int, x: mx.array, segments: Sequence[Segment]) -> mx.array:
        values = self._values[layer].astype(x.dtype)
        if self._positions is None:  # the same for every token
            y, here = mx.broadcast_to(values[None], x.shape), None
        else:
            rows = [self._positions.get(position) for position in _row_positions(segments)]
            if not any(row is not None for row in rows):
                return x
            y, here = values[mx.array([row or 0 for row in rows])], mx.array([row is not None for row in rows])
        if self._heads is not None:
            y = _where(mx.array([head in self._heads for head in range(x.shape[1])])[None], y, x)
        return y if here is None else _where(here, y, x)


def steering(model: Model, layer: Layers, vector: object, scale: float = 1.0, positions: Positions = None) -> Hooks:
    """A hook that adds `scale * vector` (`[hidden]`) to the stream that enters the `layer`. Raises `SettingError`."""
    graph = native(model)
    layers = checked_layers(graph, layer, place=RESIDUAL)
    try:
        added = mx.array(vector).astype(mx.float32) * float(scale)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise SettingError(f"a steering vector is an array of numbers: {error}") from error
    hidden = graph.norm.weight.shape[0]
    if added.shape != (hidden,):
        raise SettingError(f"a steering vector of this model has the shape ({hidden},), not {added.shape}")
    if not mx.isfinite(added).all().item():
        raise SettingError("the steering vector, or its scale, is not finite")
    chosen = None if positions is None else frozenset(_positions_of(positions))
    return _Steering(layers, added, chosen)


def patch(model: Model, source: Trace, what: str, layer: Layers, positions: Positions = None, heads: Iterable[int] | None = None) -> Hooks:
    """A hook that inserts the values of another prompt's trace, the `source`, at a place. `positions`: tokens to change, by default all
    that the source has; a mapping gives the source's position for each. Raises `SettingError`."""
    graph, place = native(model), place_to_change(what)
    held = source[place]
    layers = checked_layers(graph, tuple(held) if layer is None else layer, place=place)
    for one in layers:
        if one not in held:
            raise SettingError(f"the trace has no {place!r} of layer {one}: trace it with layers that include it")
    rows = _source_rows(positions, len(source.token_ids))
    chosen = _checked_heads(graph, place, layers, heads)
    values = {one: held[one].swapaxes(0, 1) if place == HEADS else held[one] for one in layers}
    return _Replacement(place, values, rows, chosen)


def ablation(
    model: Model,
    what: str,
    layer: Layers,
    heads: Iterable[int] | None = None,
    mean: Trace | None = None,
    positions: Positions = None,
) -> Hooks:
    """A hook that inserts zeros at a place, or with `mean` the average over that trace's positions. Raises `SettingError`."""
    graph, place = native(model), place_to_change(what)
    layers = checked_layers(graph, layer, place=place)
    chosen = _checked_heads(graph, place, layers, heads)
    values = {one: _replacement_of(graph, place, one, mean) for one in layers}
    if positions is None:
        return _Replacement(place, values, None, chosen)
    return _Replacement(place, {one: value[None] for one, value in values.items()}, dict.fromkeys(_positions_of(positions), 0), chosen)


def _replacement_of(model: Decoder, place: str, layer: int, mean: Trace | None) -> mx.array:
    if mean is not None:
        held = mean[place]
        if layer not in held:
            raise SettingError(f"the trace for the mean has no {place!r} of layer {layer}: trace it with layers that include it")
        average: mx.array = held[layer].mean(axis=1 if place == HEADS else 0)
        return average
    if place != HEADS:
        return mx.zeros((model.norm.weight.shape[0],))
    spec = model.layers[layer]
    if not isinstance(spec, AttentionSpec):
        raise SettingError(f"layer {layer} is no attention layer and has no heads")
    return mx.zeros((spec.query_heads, spec.value_dim))


def _checked_heads(model: Decoder, place: str, layers: Iterable[int], heads: Iterable[int] | None) -> tuple[int, ...] | None:
    if heads is not None and place != HEADS:
        raise SettingError(f"heads are chosen with what='heads', not with {place!r}")
    return checked_heads(model, layers, heads)


def _source_rows(positions: Positions, count: int) -> dict[int, int]:
    """Row of the source by position in the sequence. Raises `SettingError` for rows beyond the source."""
    if positions is None:
        return {position: position for position in range(count)}
    if isinstance(positions, Mapping):
        rows = {int(there): int(row) for there, row in positions.items()}
    else:
        rows = {position: position for position in _positions_of(positions)}
    for row in rows.values():
        if not 0 <= row < count:
            raise SettingError(f"position {row} is not one of the {count} that were traced")
    return rows


def _positions_of(positions: Positions) -> list[int]:
    found = [positions] if isinstance(positions, int) else list(positions or ())
    for position in found:
        if isinstance(position, bool) or not isinstance(position, int) or position < 0:
            raise SettingError(f"a position is a whole number from 0, not {position!r}")
    return found


def _row_positions(segments: Sequence[Segment]) -> list[int]:
    """Position of each row in its own sequence."""
    return [position for segment in segments for position in range(segment.past, segment.past + segment.count)]


def _mask_of(segments: Sequence[Segment], positions: frozenset[int]) -> mx.array:
    return mx.array([position in positions for position in _row_positions(segments)])


def _where(chosen: mx.array, y: mx.array, x: mx.array) -> mx.array:
    """y where `chosen`, a mask of the first axes; x elsewhere."""
    return mx.where(chosen.reshape(*chosen.shape, *(1,) * (x.ndim - chosen.ndim)), y, x)
