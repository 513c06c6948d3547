"""Adapters over a loaded model: a second graph that shares all weights, with adapted projections."""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, cast

import mlx.core as mx

from ..errors import AdapterError
from ..models.decoder import BlockStack, Model
from ..models.native.fused_blocks import Run
from ..models.pipeline_stage import NextStages
from ..util.dataclass import dataclass
from .batched_lora import AdaptedLinear, AdapterChoice, Stack, stack
from .places import changes, planned_bytes
from .update import Adapter

_PROJECT = __package__.split(".")[0]


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """A loaded adapter. Running requests keep it when its name is reused."""

    name: str
    """Name in requests."""
    slot: int
    """Index in the stacks, from 1; valid between two steps; 0 after removal."""
    digest: str
    """`Adapter.digest`, on which keys and values depend besides tokens and model."""


class AdaptedModel:
    """A model with its adapters. Steps without adapters use the unchanged model.

    Adapters are loaded and unloaded between two steps. The stacks of the remaining adapters are then built again; steps built before keep
    the old stacks.
    """

    def __init__(self, model: Model | BlockStack, adapters: Sequence[Adapter], dtype: mx.Dtype) -> None:
        """Read the adapters' factors for activations of `dtype`. Raises `AdapterError`."""
        self.adapters: dict[str, LoadedAdapter] = {}
        """Adapters by name. The engine thread owns it; other threads may look names up."""
        self.nbytes = 0
        """Bytes of all adapters."""
        self.adapted: Model | BlockStack = model
        """Graph for steps with adapters."""
        self._model, self._dtype = model, dtype
        self._choice = AdapterChoice()
        self._there: list[tuple[LoadedAdapter, Adapter]] = []
        """Adapters by slot. Unloaded ones stay while a request uses them."""
        self._stacks: dict[int, Stack] = {}
        self._restack([(LoadedAdapter(adapter.name, 0, adapter.digest), adapter) for adapter in adapters])

    def bytes_with(self, adapter: Adapter) -> int:
        """Return the bytes of all adapters with this one. Raises `AdapterError` if it does not fit the model."""
        return planned_bytes(self._model, [*(each for _, each in self._there), adapter], self._dtype)

    def load(self, adapter: Adapter) -> None:
        """Load an adapter with an unused name. Raises `AdapterError` without any change."""
        assert adapter.name not in self.adapters
        self._restack([*self._there, (LoadedAdapter(adapter.name, 0, adapter.digest), adapter)])

    def unload(self, name: str) -> None:
        """Refuse new requests for an adapter; `release` frees its memory. Raises `AdapterError` for an unknown name."""
        if self.adapters.pop(name, None) is None:
            raise AdapterError(f"no adapter called {name!r} is loaded")

    @property
    def leaving(self) -> bool:
        """True if an unloaded adapter still has memory."""
        return len(self._there) > len(self.adapters)

    def release(self, used: Container[LoadedAdapter]) -> None:
        """Free the memory of unloaded adapters outside of `used`, the adapters of all requests."""
        staying = [each for each in self._there if self.adapters.get(each[0].name) is each[0] or each[0] in used]
        if len(staying) < len(self._there):
            gone = [loaded for loaded, _ in self._there if all(loaded is not other for other, _ in staying)]
            self._restack(staying)
            for loaded in gone:
                loaded.slot = 0

    def for_rows(self, rows: Sequence[tuple[LoadedAdapter | None, int]]) -> Model:
        """Return the graph for a step; `rows` are (adapter, number of rows) in order. Valid until the next call."""
        return cast("Model", self.for_slots([(0 if adapter is None else adapter.slot, count) for adapter, count in rows]))

    def for_slots(self, rows: Sequence[tuple[int, int]]) -> BlockStack:
        """Return the graph for a step; `rows` are (slot or 0, number of rows) in order."""
        self._choice.set(rows)
        return cast("BlockStack", self.adapted)

    def _restack(self, there: Sequence[tuple[LoadedAdapter, Adapter]]) -> None:
        """Build the stacks of these adapters in the order of their slots. Raises `AdapterError` without any change."""
        adapters, before = [adapter for _, adapter in there], [loaded.slot for loaded, _ in there]
        found = changes(self._model, adapters)
        stacks = {id(each.linear): stack(each, adapters, self._dtype, self._stacks.get(id(each.linear)), before) for each in found}
        replaced = {id(each.linear): AdaptedLinear(each.linear, stacks[id(each.linear)], self._choice) for each in found}
        # Other machines may have all adapted matrices, and must receive the choice.
        divided = isinstance(self._model, BlockStack) and self._model.divided
        self.adapted = _twin(self._model, replaced, self._choice) if replaced or divided else self._model
        self.nbytes = sum(each.nbytes for each in stacks.values())
        self._stacks, self._there = stacks, list(there)
        for slot, (loaded, _) in enumerate(there, 1):
            if not loaded.slot:
                self.adapters[loaded.name] = loaded
            loaded.slot = slot


def _twin(model: Model | BlockStack, replaced: Mapping[int, AdaptedLinear], choice: AdapterChoice) -> BlockStack:
    assert isinstance(model, BlockStack)  # `changes` refuses others
    twin = copy.copy(model)
    memo: dict[int, Any] = dict(replaced)
    twin.blocks = [_copied(block, memo) for block in model.blocks]
    twin.runs = [Run(twin.blocks)]
    twin.rest, twin.spread = _with_adapters(model.rest, choice), _with_adapters(model.spread, choice)
    return twin


def _with_adapters(others: NextStages | None, choice: AdapterChoice) -> NextStages | None:
    """Return the other machines' stages with the adapters of the rows added to each call."""
    return None if others is None else lambda x, step, inputs, adapters=(): others(x, step, inputs, choice.counts)


def _copied(node: Any, memo: dict[int, Any]) -> Any:
    """Return the node itself if nothing below is replaced, otherwise a copy with the replacements."""
    key = id(node)
    if key in memo:
        return memo[key]
    memo[key] = node
    if isinstance(node, (list, tuple)):
        items = [_copied(item, memo) for item in node]
        if any(new is not old for new, old in zip(items, node, strict=True)):
            memo[key] = type(node)(items)
    elif type(node).__module__.split(".")[0] == _PROJECT:
        memo[key] = _copied_object(node, memo)
    return memo[key]


def _copied_object(node: Any, memo: dict[int, Any]) -> Any:
    names = [field.name for field in fields(node)] if is_dataclass(node) else list(getattr(node, "__dict__", ()))
    new = {name: _copied(getattr(node, name), memo) for name in names}
    changed = {name: value for name, value in new.items() if value is not getattr(node, name)}
    if not changed:
        return node
    twin = copy.copy(node)
    for name, value in changed.items():
        object.__setattr__(twin, name, value)
    return twin
