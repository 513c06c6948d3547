"""Graphs, as the phantom GPU records them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Marked:
    """An operation that MLX fuses on a GPU. `details` are what its cost depends on besides shapes."""

    name: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Node:
    """A primitive of a submitted graph, or a marked operation. `inputs` and `outputs` are names of arrays."""

    name: str
    arguments: list[Any]
    """State of the primitive, as `mx.export_function` reports it."""
    inputs: list[str]
    outputs: list[str]
    details: dict[str, Any]
    """Those of `Marked`; empty for primitives."""


@dataclass(slots=True)
class Graph:
    """A submission: nodes in an order in which they can run, shapes and dtypes of all arrays, and the requested arrays."""

    nodes: list[Node] = field(default_factory=list)
    shapes: dict[str, tuple[tuple[int, ...], mx.Dtype]] = field(default_factory=dict)
    results: list[str] = field(default_factory=list)
