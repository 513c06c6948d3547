"""Adapters over a loaded model: the same graph once more, sharing every weight, with changed projections in place of the model's."""

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
from .batched_lora import Choice, Stack, stack
from .lora_linear import AdaptedLinear
from .places import changes, planned_bytes
from .update import Adapter

_PROJECT = __package__.split(".")[0]


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """An adapter that requests can ask for. Requests that have it keep it when its name is given to another."""

    name: str
    """What they call it."""
    slot: int
    """Its place in the stacks, from 1, between two steps; 0 once it is gone."""
    digest: str
    """`Adapter.digest`: what its keys and values depend on besides tokens and the model."""


class AdaptedModel:
    """A model with its adapters. The model itself is left as it is, and steps without adapters go through that.

    Adapters come and go between two steps: the stacks of all that stay are made anew then, and steps that were built before go on with
    the old ones.
    """

    def __init__(self, model: Model | BlockStack, adapters: Sequence[Adapter], dtype: mx.Dtype) -> None:
        """Reads the numbers of the adapters, in `dtype`, that of the activations. Raises `AdapterError`s."""
        self.adapters: dict[str, LoadedAdapter] = {}
        """Those that requests can ask for, by name. Belongs to the thread that computes; others may look names up."""
        self.nbytes = 0
        """Bytes that the adapters take."""
        self.adapted: Model | BlockStack = model
        """The graph for steps with adapters."""
        self._model, self._dtype = model, dtype
        self._choice = Choice()
        self._there: list[tuple[LoadedAdapter, Adapter]] = []
        """By slot. Those that were unloaded stay as long as a request has them."""
        self._stacks: dict[int, Stack] = {}
        self._hold([(LoadedAdapter(adapter.name, 0, adapter.digest), adapter) for adapter in adapters])

    def bytes_with(self, adapter: Adapter) -> int:
        """Bytes that the adapters take once this one is among them. Raises `AdapterError` if it does not fit the model."""
        return planned_bytes(self._model, [*(each for _, each in self._there), adapter], self._dtype)

    def load(self, adapter: Adapter) -> None:
        """Let requests ask for a further one, whose name is not taken. Reads its numbers; raises `AdapterError`, and then nothing has
        changed."""
        assert adapter.name not in self.adapters
        self._hold([*self._there, (LoadedAdapter(adapter.name, 0, adapter.digest), adapter)])

    def unload(self, name: str) -> None:
        """From now on no request can ask for it; `let_go` gives its memory back. Raises `AdapterError` for a name that there is not."""
        if self.adapters.pop(name, None) is None:
            raise AdapterError(f"there is no adapter called {name!r} to unload")

    @property
    def leaving(self) -> bool:
        """Whether any was unloaded and is still there."""
        return len(self._there) > len(self.adapters)

    def let_go(self, used: Container[LoadedAdapter]) -> None:
        """Give back the memory of those that were unloaded and that no request has: `used` are those of all requests."""
        staying = [each for each in self._there if self.adapters.get(each[0].name) is each[0] or each[0] in used]
        if len(staying) < len(self._there):
            gone = [loaded for loaded, _ in self._there if all(loaded is not other for other, _ in staying)]
            self._hold(staying)
            for loaded in gone:
                loaded.slot = 0

    def for_rows(self, rows: Sequence[tuple[LoadedAdapter | None, int]]) -> Model:
        """The graph for a step: `rows` are adapters and how many rows they are for, in order. Good until the next call."""
        return cast("Model", self.for_slots([(0 if adapter is None else adapter.slot, count) for adapter, count in rows]))

    def for_slots(self, rows: Sequence[tuple[int, int]]) -> BlockStack:
        """The same, for the adapters' places in the stacks; 0 is none."""
        self._choice.set(rows)
        return cast("BlockStack", self.adapted)

    def _hold(self, there: Sequence[tuple[LoadedAdapter, Adapter]]) -> None:
        """Stack these, in the order of their slots. Raises `AdapterError`, and then nothing has changed."""
        adapters, before = [adapter for _, adapter in there], [loaded.slot for loaded, _ in there]
        found = changes(self._model, adapters)
        stacks = {id(each.linear): stack(each, adapters, self._dtype, self._stacks.get(id(each.linear)), before) for each in found}
        replaced = {id(each.linear): AdaptedLinear(each.linear, stacks[id(each.linear)], self._choice) for each in found}
        # Other machines may have all that an adapter changes, and have to be told.
        divided = isinstance(self._model, BlockStack) and self._model.divided
        self.adapted = _twin(self._model, replaced, self._choice) if replaced or divided else self._model
        self.nbytes = sum(each.nbytes for each in stacks.values())
        self._stacks, self._there = stacks, list(there)
        for slot, (loaded, _) in enumerate(there, 1):
            if not loaded.slot:
                self.adapters[loaded.name] = loaded
            loaded.slot = slot


def _twin(model: Model | BlockStack, replaced: Mapping[int, AdaptedLinear], choice: Choice) -> BlockStack:
    assert isinstance(model, BlockStack)  # `changes` refuses others
    twin = copy.copy(model)
    memo: dict[int, Any] = dict(replaced)
    twin.blocks = [_copied(block, memo) for block in model.blocks]
    twin.runs = [Run(twin.blocks)]
    twin.rest, twin.spread = _telling(model.rest, choice), _telling(model.spread, choice)
    return twin


def _telling(others: NextStages | None, choice: Choice) -> NextStages | None:
    """Other machines, told which adapters the rows have."""
    return None if others is None else lambda x, step, inputs, adapters=(): others(x, step, inputs, choice.counts)


def _copied(node: Any, memo: dict[int, Any]) -> Any:
    """The node itself where nothing below it is replaced, or else a copy that refers to what replaces it."""
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
