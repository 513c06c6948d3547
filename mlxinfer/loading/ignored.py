"""Keys of a model's config that the user wants ignored wherever the model is opened while a conversion or a comparison lasts."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

_BY_PATH: dict[Path, tuple[str, ...]] = {}


@contextmanager
def ignoring(path: Path, keys: Collection[str]) -> Iterator[None]:
    """Let every checkpoint that is opened at this path pass over these keys of its config."""
    before = _BY_PATH.get(path, ())
    _BY_PATH[path] = (*before, *keys)
    try:
        yield
    finally:
        _BY_PATH[path] = before


def ignored_keys(path: Path, keys: Collection[str] = ()) -> tuple[str, ...]:
    """These keys, and those of `ignoring` for the path."""
    return (*keys, *_BY_PATH.get(path, ()))
