"""What a GPU that computes nothing records: graphs, as programs submit them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Marked:
    """What a marked node stands for."""

    name: str
    """"RMSNorm", "LayerNorm", "RoPE", "SDPA", "Compiled", or "CustomKernel"."""
    details: dict[str, Any] = field(default_factory=dict)
    """What the cost depends on besides shapes: of a custom kernel its name, its inputs' names and the arrays."""


@dataclass(frozen=True, slots=True)
class Node:
    """One primitive of a submitted graph."""

    name: str
    """MLX's name of the primitive, or that of a marked node."""
    arguments: list[Any]
    """Its state, as `mx.export_function` reports it."""
    inputs: list[str]
    """Names of arrays within the graph."""
    outputs: list[str]
    """The same."""
    details: dict[str, Any]
    """Those of a marked node; empty for others."""


@dataclass(slots=True)
class Graph:
    """One submission: its nodes in an order in which they can run."""

    nodes: list[Node] = field(default_factory=list)
    """Primitives, with those that are only views."""
    shapes: dict[str, tuple[tuple[int, ...], mx.Dtype]] = field(default_factory=dict)
    """Of every array by its name."""
    results: list[str] = field(default_factory=list)
    """The arrays that were asked for."""
