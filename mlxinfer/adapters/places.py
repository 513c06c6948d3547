"""Projections of a model as targets of adapters, checked before weights are read; shards of adapters for several machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial

import mlx.core as mx
import numpy as np

from .. import kernels_cpu
from ..errors import AdapterError, UnsupportedModelError
from ..models.decoder import BlockStack, Model
from ..models.pipeline_stage import Stage
from ..models.tensor_parallel import BY_COLUMNS, BY_ROWS
from ..nn.linear import Linear
from ..nn.packing import objects
from ..util.dataclass import dataclass
from ..util.device import is_gpu
from .update import Adapter, Factors, Update, for_another_model, key_of, not_applied

_PANEL = 16, 32
"""Rows and columns to whose multiples packed matrices are padded."""


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """Rows of a matrix that form one projection."""

    linear: Linear
    """Owner of the matrix."""
    first: int
    rows: int
    order: np.ndarray | None
    """Checkpoint row of each row, int `[rows]`; None for the same order."""


@dataclass(frozen=True, slots=True)
class MatrixChanges:
    """Projections of one matrix that adapters update."""

    linear: Linear
    """Owner of the matrix."""
    places: dict[str, AdapterTarget] = field(default_factory=dict)
    """Updated projections by key."""
    ranks: dict[str, int] = field(default_factory=dict)
    """Largest rank of each projection."""

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix, `[out, in]`."""
        out, into = self.linear.matrix.shape
        return out, into

    @property
    def rank(self) -> int:
        """Total rank: the columns of all projections, adjacent to one another."""
        return sum(self.ranks.values())

    def column(self, key: str) -> int:
        """Return the first column of a projection."""
        keys = list(self.places)
        return sum(self.ranks[before] for before in keys[: keys.index(key)])


def places(model: Model | BlockStack) -> dict[str, AdapterTarget]:
    """Return the projections that adapters can update, by key. Raises `UnsupportedModelError` for a model without a native graph."""
    if not isinstance(model, BlockStack):
        raise UnsupportedModelError(
            "adapters need a graph of this project's own, and this model runs on mlx-lm's: convert it with the adapter"
        )
    found: dict[str, AdapterTarget] = {}
    for node in objects(model.blocks):
        if type(node) is Linear:
            first = 0
            for each in node.projections:
                if not each.in_parts:
                    found[key_of(each.name)] = AdapterTarget(node, first, each.rows, each.order)
                first += each.rows
    return found


def changes(model: Model | BlockStack, adapters: Sequence[Adapter]) -> list[MatrixChanges]:
    """Return the adapters' changes per matrix; the model may have shapes only.

    Raises `AdapterError` for an update without a target or with another shape.
    """
    known = places(model)
    found: dict[int, MatrixChanges] = {}
    for adapter in adapters:
        for key, update in adapter.updates.items():
            place = known.get(key)
            if place is None:
                raise not_applied(adapter.path, update.tensor, _missing(update.tensor, key, known))
            expected = (place.rows, place.linear.matrix.shape[-1])
            if update.shape != expected:
                raise for_another_model(adapter.path, update, "the model's", expected)
            of_matrix = found.setdefault(id(place.linear), MatrixChanges(place.linear))
            of_matrix.places[key] = place
            of_matrix.ranks[key] = max(of_matrix.ranks.get(key, 0), update.rank)
    return list(found.values())


def of_part(model: Model | BlockStack, adapters: Sequence[Adapter]) -> tuple[Adapter, ...]:
    """Return the adapters restricted to a part of a model; they must fit the whole model."""
    known = places(model)
    return tuple([replace(a, updates={key: update for key, update in a.updates.items() if key in known}) for a in adapters])


def factor_dtype(dtype: mx.Dtype) -> mx.Dtype:
    """Return the dtype of factors for activations of `dtype`: float32 on a CPU, the only dtype that MLX gathers there."""
    return dtype if is_gpu() or packs_factors() else mx.float32


def packs_factors() -> bool:
    """Return True if the CPU kernels multiply factors."""
    return not is_gpu() and kernels_cpu.available()


def planned_bytes(model: Model | BlockStack, adapters: Sequence[Adapter], dtype: mx.Dtype) -> int:
    """Return the bytes that adapters will use with activations of `dtype`. Raises as `changes` does."""
    found, size = changes(model, adapters), factor_dtype(dtype).size
    slots = len(adapters) + 1
    gains = sum(c.shape[0] * (1 if c.linear.bias is None else 2) for c in found if has_gain(c, adapters))
    return slots * sum(_factor_elements(c) for c in found) * size + slots * gains * 4


def _factor_elements(changes: MatrixChanges) -> int:
    """Return the number of elements of one adapter's factors of a matrix."""
    (out, into), rank = changes.shape, changes.rank
    if not packs_factors():
        return rank * (out + into)
    rows, columns = (partial(_rounded_up, to=to) for to in _PANEL)
    return rows(rank) * columns(into) + rows(out) * columns(rank)


def _rounded_up(count: int, to: int) -> int:
    return -(-count // to) * to


def has_gain(changes: MatrixChanges, adapters: Sequence[Adapter]) -> bool:
    """Return True if an adapter has a magnitude for a matrix."""
    return any(update.has_magnitude for adapter in adapters for key, update in adapter.updates.items() if key in changes.places)


def _missing(tensor: str, key: str, known: Mapping[str, AdapterTarget]) -> str:
    """Return the reason why an update has no target; "" if its name is reason enough."""
    parts = key.split(".")
    layers = {name.split(".")[1] for name in known}
    if parts[0] == "layers" and len(parts) > 1 and parts[1] not in layers and layers:
        return f"is for layer {parts[1]}, which the model does not have"
    special = any(part in tensor for part in ("embed", "lm_head", "expert", "switch_mlp", "modules_to_save"))
    return "" if special else "is for no projection of attention or of a feed-forward layer that the model has"


def of_share(adapters: Sequence[Adapter], part: Stage) -> tuple[Adapter, ...]:
    """Return the adapters for one shard of all blocks; they must fit the whole model.

    `b` is divided by rows where the matrix is, and `a` by columns, so the shards' updates sum up like their products. Raises `AdapterError`
    for magnitudes of matrices divided by columns, which need the length of whole rows.
    """
    return tuple(
        [replace(each, updates={key: _cut_update(each, update, part) for key, update in each.updates.items()}) for each in adapters]
    )


def _cut_update(adapter: Adapter, update: Update, part: Stage) -> Update:
    name, (out, into) = update.key.rpartition(".")[2], update.shape
    if name in BY_ROWS:
        return replace(update, shape=(out // part.shares, into), read=_rows(update.read, part, out // part.shares))
    assert name in BY_COLUMNS  # families with tensor parallelism have no other projections
    if update.has_magnitude:
        raise AdapterError(
            f"{adapter.path}: the adapter has magnitudes (DoRA) for {name}, whose rows --split tensor divides: leave that out, to divide "
            "the model by layers"
        )
    return replace(update, shape=(out, into // part.shares), read=_columns(update.read, part, into // part.shares))


def _rows(read: Callable[[], Factors], part: Stage, count: int) -> Callable[[], Factors]:
    own = slice(part.share * count, (part.share + 1) * count)

    def cut() -> Factors:
        whole = read()
        return Factors(whole.a, whole.b[own], None if whole.magnitude is None else whole.magnitude[own])

    return cut


def _columns(read: Callable[[], Factors], part: Stage, count: int) -> Callable[[], Factors]:
    own = slice(part.share * count, (part.share + 1) * count)

    def cut() -> Factors:
        whole = read()
        return Factors(whole.a[:, own], whole.b)

    return cut
