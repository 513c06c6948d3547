"""What an object holds, however deep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import mlx.core as mx


def arrays(node: object) -> Iterator[mx.array]:
    """Every array reachable through attributes, dataclass fields, lists, tuples and dict values."""
    return (leaf for leaf in objects(node) if isinstance(leaf, mx.array))


def objects(node: object) -> Iterator[object]:
    """Every array and every object of this project that is reachable in the same ways, `node` included, holders before what they hold."""
    if isinstance(node, mx.array):
        yield node
    elif isinstance(node, (list, tuple)):
        for item in node:
            yield from objects(item)
    elif isinstance(node, dict):
        yield from objects(list(node.values()))
    elif is_dataclass(node) and not isinstance(node, type):
        yield node
        yield from objects([getattr(node, field.name) for field in fields(node)])
    elif hasattr(node, "__dict__") and type(node).__module__.startswith(__package__.split(".")[0]):
        yield node
        yield from objects(vars(node))
