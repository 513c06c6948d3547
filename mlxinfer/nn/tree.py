"""What an object holds, however deep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import TypeVar

import mlx.core as mx

Part = TypeVar("Part")


def arrays(node: object) -> Iterator[mx.array]:
    """Every array reachable through attributes, dataclass fields, lists, tuples and dict values."""
    return instances(node, mx.array)


def instances(node: object, kind: type[Part] | tuple[type[Part], ...]) -> Iterator[Part]:
    """Every object of a kind that is reachable in the same way; what is inside a found one is not looked at."""
    if isinstance(node, kind):
        yield node
    elif isinstance(node, (list, tuple)):
        for item in node:
            yield from instances(item, kind)
    elif isinstance(node, dict):
        yield from instances(list(node.values()), kind)
    elif is_dataclass(node) and not isinstance(node, type):
        yield from instances([getattr(node, field.name) for field in fields(node)], kind)
    elif hasattr(node, "__dict__") and type(node).__module__.startswith(__package__.split(".")[0]):
        yield from instances(vars(node), kind)
