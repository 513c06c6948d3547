"""The arrays that an object holds, however deep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import mlx.core as mx


def arrays(node: object) -> Iterator[mx.array]:
    """Every array reachable through attributes, dataclass fields, lists, tuples and dict values."""
    if isinstance(node, mx.array):
        yield node
    elif isinstance(node, (list, tuple)):
        for item in node:
            yield from arrays(item)
    elif isinstance(node, dict):
        yield from arrays(list(node.values()))
    elif is_dataclass(node) and not isinstance(node, type):
        yield from arrays([getattr(node, field.name) for field in fields(node)])
    elif hasattr(node, "__dict__") and type(node).__module__.startswith(__package__.split(".")[0]):
        yield from arrays(vars(node))
