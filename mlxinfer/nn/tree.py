"""What an object holds, however deep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache

import mlx.core as mx


def arrays(node: object) -> Iterator[mx.array]:
    """Every array reachable through attributes, dataclass fields, lists, tuples and dict values."""
    return (leaf for leaf in objects(node) if isinstance(leaf, mx.array))


def objects(node: object) -> Iterator[object]:
    """Every array and every object of this project that is reachable in the same ways, `node` included, holders before what they
    hold, each once."""
    return _objects(node, set())


def _objects(node: object, seen: set[int]) -> Iterator[object]:
    if isinstance(node, (list, tuple)):
        for item in node:
            yield from _objects(item, seen)
        return
    if isinstance(node, dict):
        yield from _objects(list(node.values()), seen)
        return
    held = _held(node)
    if id(node) not in seen and held is not None:
        seen.add(id(node))
        yield node
        yield from _objects(held, seen)


def _held(node: object) -> list[object] | None:
    """What hangs on an array or on an object of this project; None for anything else."""
    names = _names(type(node))  # type: ignore[arg-type]  # mypy takes object's __hash__ for that of the type
    if names is not None:
        return [getattr(node, name) for name in names]
    if hasattr(node, "__dict__") and type(node).__module__.startswith(_PROJECT):
        return list(vars(node).values())
    return None


_PROJECT = __package__.split(".")[0]


@cache
def _names(kind: type) -> tuple[str, ...] | None:
    """The fields of a dataclass, none of an array; None for what is neither."""
    if issubclass(kind, mx.array):
        return ()
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else None
