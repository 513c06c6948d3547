"""Memory of routed experts that stay in a file: how much of a model must be resident, and how many experts of a layer have a slot."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

import mlx.core as mx

from ...models.decoder import Model
from ...models.expert_records import RoutedTensors, routed_experts
from ...nn.packing import objects
from ...nn.routes import Route
from ...util.dataclass import dataclass
from ...util.environment import is_gigabytes
from ...util.uncached_file import whole_pages
from ..weights import PlannedTensor
from .step import Planned

EXPERTS_MEMORY = "MLXINFER_EXPERTS_MEMORY"
REPEATED_SHARE = 0.25
"""Assumed share of a token's experts that earlier tokens have brought into memory. The rest is assumed to be uniform."""
_ROWS_IN_WAITING = 2
"""Sets of a token's experts that a pool holds at least: one that is computed, and one that is read."""
_COPIES = 2
"""Copies of the largest layer's experts that exist while they are read, joined and packed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayer:
    """The routed experts of one layer of a model that is not loaded yet."""

    key: str
    """Name in the graph, such as `model.layers.3.mlp.experts`."""
    experts: int
    chosen: int
    """Experts of a token."""
    nbytes: int
    """Bytes of all experts in memory."""

    @property
    def record_bytes(self) -> int:
        """Bytes of one expert in memory."""
        return -(-self.nbytes // self.experts)

    @property
    def read_bytes(self) -> int:
        """Bytes of one expert's record in the file, with its padding."""
        return whole_pages(self.record_bytes)

    @property
    def least_slots(self) -> int:
        return min(self.experts, _ROWS_IN_WAITING * self.chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledLayer(ExpertLayer):
    """A layer whose experts have slots in memory, but not all of them at once."""

    slots: int
    """Experts that are resident at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMemory:
    """Pools for the routed experts of a model, of which the rest is resident. Bytes, unless a field says otherwise."""

    layers: tuple[PooledLayer, ...]
    dense: int
    """Weights of the model that are always resident: all besides the routed experts."""

    @property
    def pools(self) -> int:
        """Bytes of all pools."""
        return sum(layer.slots * layer.record_bytes for layer in self.layers)

    @property
    def least(self) -> int:
        """Minimum bytes of all pools."""
        return sum(layer.least_slots * layer.record_bytes for layer in self.layers)

    def resized(self, nbytes: int) -> ExpertMemory:
        """Return pools of at most `nbytes` together, or of the minimum, for the same layers."""
        return ExpertDemand(layers=self.layers).pooled(nbytes, self.dense)

    @property
    def all_experts(self) -> int:
        """Bytes of all routed experts."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def slots(self) -> Mapping[str, int]:
        """Slots of each layer's pool."""
        return {layer.key: layer.slots for layer in self.layers}

    @property
    def resident_share(self) -> float:
        """Share of the experts' bytes that is resident."""
        return self.pools / self.all_experts

    @property
    def uniform_hit_rate(self) -> float:
        """Share of a token's experts that are resident if the router chooses all experts equally often."""
        return sum(layer.chosen * layer.slots / layer.experts for layer in self.layers) / sum(layer.chosen for layer in self.layers)

    @property
    def chosen_bytes(self) -> int:
        """Bytes of a token's experts in the file."""
        return sum(layer.chosen * layer.read_bytes for layer in self.layers)

    def hit_rate(self, repeated: float = REPEATED_SHARE) -> float:
        """Expected share of a token's experts that are resident. `repeated` of them are, whatever the slots; the others are uniform."""
        return repeated + (1 - repeated) * self.uniform_hit_rate

    def token_bytes(self, hit_rate: float | None = None) -> int:
        """Bytes read for a token at this hit rate, by default the expected one."""
        return int(self.chosen_bytes * (1 - (self.hit_rate() if hit_rate is None else hit_rate)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertDemand:
    """Routed experts of a model, and the memory that its caller allows for them."""

    layers: tuple[ExpertLayer, ...]
    wanted: int | None = None
    """Bytes of the pools; None for what the model's other memory leaves, and only if not all experts fit."""

    @property
    def nbytes(self) -> int:
        """Bytes of all routed experts."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def least(self) -> int:
        """Minimum bytes of the pools."""
        return sum(layer.least_slots * layer.record_bytes for layer in self.layers)

    def pooled(self, nbytes: int, dense: int) -> ExpertMemory:
        """Divide `nbytes` among the layers: each gets slots for the same share of its experts. `dense` as in `ExpertMemory`."""
        share = min(nbytes / self.nbytes, 1.0)
        layers = [
            PooledLayer(
                key=layer.key,
                experts=layer.experts,
                chosen=layer.chosen,
                nbytes=layer.nbytes,
                slots=min(max(int(share * layer.experts), layer.least_slots), layer.experts),
            )
            for layer in self.layers
        ]
        return ExpertMemory(layers=tuple(layers), dense=dense)

    def beside(self, planned: Planned, memory: ExpertMemory) -> PooledModel:
        """Return `planned` with `memory` instead of all experts.

        One layer's experts at a time are read and written to the file. The pools are allocated when all layers are in the file.
        """
        reading = max(planned.load_bytes, _COPIES * max(layer.nbytes for layer in self.layers))
        return PooledModel(planned.model, memory.dense + memory.pools, max(reading - memory.pools, 0), planned.dtype)


@dataclass(frozen=True, slots=True)
class PooledModel:
    """A model of which some experts stay in a file. Implements `Planned`."""

    model: Model
    weight_bytes: int
    """Dense weights and pools."""
    load_bytes: int
    dtype: mx.Dtype


def expert_demand(layers: Sequence[ExpertLayer], experts_memory: float | str | None) -> ExpertDemand | None:
    """Return the demand of a model's routed experts for `EngineArgs.experts_memory`; None for a model without any, and for 0 GB.

    None is "auto", which `MLXINFER_EXPERTS_MEMORY` replaces.
    """
    if experts_memory in (None, "auto"):
        text = os.environ.get(EXPERTS_MEMORY, "").strip()
        experts_memory = float(text) if is_gigabytes(text) else None
    if not layers or experts_memory == 0:
        return None
    return ExpertDemand(layers=tuple(layers), wanted=None if experts_memory is None else int(float(experts_memory) * 1e9))


def expert_layers(model: Model, tensors: Mapping[str, PlannedTensor]) -> tuple[ExpertLayer, ...]:
    """Find the routed experts in the blocks of a model whose graph requested `tensors`. Those of a draft head are not among them."""

    def nbytes(key: str, count: int) -> int:
        own = RoutedTensors([key])
        return sum(each.nbytes for name, each in tensors.items() if name in own and each.request.shape[0] == count)

    return tuple(
        ExpertLayer(key=key, experts=count, chosen=chosen, nbytes=nbytes(key, count)) for key, count, chosen in _routed_experts(model)
    )


def layers_in(model: Model, layers: Sequence[ExpertLayer]) -> tuple[ExpertLayer, ...]:
    """Return those of `layers` that are in `model`, which may be a part of the whole."""
    keys = {key for key, _, _ in _routed_experts(model)}
    return tuple(layer for layer in layers if layer.key in keys)


def _routed_experts(model: Model) -> Iterator[tuple[str, int, int]]:
    """Yield (name in the graph, experts, experts of a token) of each layer with routed experts."""
    for node in objects(getattr(model, "blocks", ())):
        route = getattr(node, "route", None)
        if isinstance(route, Route):
            for key, layer in routed_experts(getattr(node, "experts", None)):
                yield key, layer.down.matrix.shape[0], route.rule.chosen
