"""Where in a model each projection is, for adapters to be held against it before a weight is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import partial

import mlx.core as mx
import numpy as np

from .. import kernels_cpu
from ..errors import UnsupportedModelError
from ..models.decoder import BlockStack, Model
from ..nn.linear import Linear
from ..nn.packing import objects
from ..util.dataclass import dataclass
from ..util.device import is_gpu
from .update import Adapter, for_another_model, key_of, not_applied

_PANEL = 16, 32
"""Packed matrices are padded to a multiple of so many rows and columns."""


@dataclass(frozen=True, slots=True)
class Place:
    """Rows of a matrix that are one projection."""

    linear: Linear
    """Holds the matrix."""
    first: int
    """The first of the rows."""
    rows: int
    """How many there are."""
    order: np.ndarray | None
    """int `[rows]`: which row of the checkpoint each is; None where they are in order."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What a number of adapters change in one matrix."""

    linear: Linear
    """Holds the matrix."""
    places: dict[str, Place] = field(default_factory=dict)
    """The projections that any of them changes, by key."""
    ranks: dict[str, int] = field(default_factory=dict)
    """The largest rank of any of them, for each."""

    @property
    def shape(self) -> tuple[int, int]:
        """`[out, in]` of the matrix."""
        out, into = self.linear.matrix.shape
        return out, into

    @property
    def rank(self) -> int:
        """Columns between the two products: those of one projection next to those of another."""
        return sum(self.ranks.values())

    def column(self, key: str) -> int:
        """The first of those columns that are a projection's."""
        keys = list(self.places)
        return sum(self.ranks[before] for before in keys[: keys.index(key)])


def places(model: Model | BlockStack) -> dict[str, Place]:
    """The projections of a model that adapters can change, by key. Raises `UnsupportedModelError` for a model without a graph here."""
    if not isinstance(model, BlockStack):
        raise UnsupportedModelError(
            "adapters need a graph of this project's own, and this model runs on mlx-lm's: convert it with the adapter"
        )
    found: dict[str, Place] = {}
    for node in objects(model.blocks):
        if type(node) is Linear:
            first = 0
            for each in node.projections:
                if not each.in_parts:
                    found[key_of(each.name)] = Place(node, first, each.rows, each.order)
                first += each.rows
    return found


def changes(model: Model | BlockStack, adapters: Sequence[Adapter]) -> list[Changes]:
    """What adapters change in a model, matrix by matrix; the model may have shapes only. Raises `AdapterError` for an update that has no
    place or another shape."""
    known = places(model)
    found: dict[int, Changes] = {}
    for adapter in adapters:
        for key, update in adapter.updates.items():
            place = known.get(key)
            if place is None:
                raise not_applied(adapter.path, update.tensor, _missing(update.tensor, key, known))
            expected = (place.rows, place.linear.matrix.shape[-1])
            if update.shape != expected:
                raise for_another_model(adapter.path, update, "the model's", expected)
            of_matrix = found.setdefault(id(place.linear), Changes(place.linear))
            of_matrix.places[key] = place
            of_matrix.ranks[key] = max(of_matrix.ranks.get(key, 0), update.rank)
    return list(found.values())


def of_part(model: Model | BlockStack, adapters: Sequence[Adapter]) -> tuple[Adapter, ...]:
    """What adapters change in a part of a model, once it is known that they fit the whole."""
    known = places(model)
    return tuple([replace(a, updates={key: update for key, update in a.updates.items() if key in known}) for a in adapters])


def factor_dtype(dtype: mx.Dtype) -> mx.Dtype:
    """What factors are kept in where activations are in `dtype`: where MLX computes on a CPU float32, as it gathers nothing else there."""
    return dtype if is_gpu() or packs_factors() else mx.float32


def packs_factors() -> bool:
    """Whether the CPU kernels multiply factors."""
    return not is_gpu() and kernels_cpu.available()


def planned_bytes(model: Model | BlockStack, adapters: Sequence[Adapter], dtype: mx.Dtype) -> int:
    """Bytes that adapters will take next to activations in `dtype`. Raises as `changes`."""
    found, size = changes(model, adapters), factor_dtype(dtype).size
    slots = len(adapters) + 1
    gains = sum(c.shape[0] * (1 if c.linear.bias is None else 2) for c in found if has_gain(c, adapters))
    return slots * sum(_numbers(c) for c in found) * size + slots * gains * 4


def _numbers(changes: Changes) -> int:
    """How many numbers one adapter's factors of a matrix take."""
    (out, into), rank = changes.shape, changes.rank
    if not packs_factors():
        return rank * (out + into)
    rows, columns = (partial(_rounded_up, to=to) for to in _PANEL)
    return rows(rank) * columns(into) + rows(out) * columns(rank)


def _rounded_up(count: int, to: int) -> int:
    return -(-count // to) * to


def has_gain(changes: Changes, adapters: Sequence[Adapter]) -> bool:
    """Whether any adapter has a magnitude for a matrix."""
    return any(update.has_magnitude for adapter in adapters for key, update in adapter.updates.items() if key in changes.places)


def _missing(tensor: str, key: str, known: Mapping[str, Place]) -> str:
    """Why an update has no place; empty for the usual reasons, which its name tells."""
    parts = key.split(".")
    layers = {name.split(".")[1] for name in known}
    if parts[0] == "layers" and len(parts) > 1 and parts[1] not in layers and layers:
        return f"is for layer {parts[1]}, which the model does not have"
    special = any(part in tensor for part in ("embed", "lm_head", "expert", "switch_mlp", "modules_to_save"))
    return "" if special else "is for no projection of attention or of a feed-forward layer that the model has"
