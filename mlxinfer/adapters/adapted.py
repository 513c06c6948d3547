"""Adapters over a loaded model: the same graph once more, sharing every weight, with changed projections in place of the model's."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import mlx.core as mx

from ..models.decoder import Decoder, Model
from ..models.fused_blocks import Run
from ..nn.linear import Linear
from ..records import dataclass
from .linear import AdaptedLinear
from .places import changes
from .stacked import Choice, Stack, stack
from .update import Adapter

_PROJECT = __package__.split(".")[0]


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter that requests can ask for."""

    name: str
    """What they call it."""
    slot: int
    """Its place in the stacks, from 1."""
    digest: str
    """`Adapter.digest`: what its keys and values depend on besides tokens and the model."""


class AdaptedModel:
    """A model with its adapters. The model itself is left as it is, and steps without adapters go through that."""

    def __init__(self, model: Model, adapters: Sequence[Adapter], dtype: mx.Dtype) -> None:
        """Reads the numbers of the adapters, in `dtype`, that of the activations. Raises `AdapterError`s."""
        self.adapters = {a.name: LoadedAdapter(a.name, slot, a.digest) for slot, a in enumerate(adapters, 1)}
        self._choice = Choice()
        stacks: dict[int, tuple[Linear, Stack]] = {}
        for each in changes(model, adapters):
            stacks[id(each.linear)] = each.linear, stack(each, adapters, dtype)
        self.nbytes = sum(s.nbytes for _, s in stacks.values())
        """Bytes that the adapters take."""
        self.adapted = _twin(model, {key: AdaptedLinear(linear, s, self._choice) for key, (linear, s) in stacks.items()})
        """The graph for steps with adapters."""

    def for_rows(self, rows: Sequence[tuple[LoadedAdapter | None, int]]) -> Model:
        """The graph for a step: `rows` are adapters and how many rows they are for, in order. Good until the next call."""
        self._choice.set([(0 if adapter is None else adapter.slot, count) for adapter, count in rows])
        return self.adapted


def _twin(model: Model, replaced: Mapping[int, AdaptedLinear]) -> Decoder:
    assert isinstance(model, Decoder)  # `changes` refuses others
    twin = copy.copy(model)
    memo: dict[int, Any] = dict(replaced)
    twin.blocks = [_copied(block, memo) for block in model.blocks]
    twin.runs = [Run(twin.blocks)]
    return twin


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
