"""The destination directory: it appears complete, by a rename, or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import DestinationError

_SLACK = 16 << 20


def check_destination(destination: Path) -> None:
    """Raise `DestinationError` if it exists or cannot be created."""
    if os.path.lexists(destination):
        raise DestinationError(f"{destination} exists: choose another destination, or delete it")
    parent = destination.parent
    if not parent.is_dir():
        raise DestinationError(f"there is no directory {parent}: create it first")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise DestinationError(f"{parent} is not writable")


def check_room(destination: Path, nbytes: int) -> None:
    """Raise `DestinationError` unless `nbytes` are free there."""
    free = shutil.disk_usage(destination.parent).free
    if free < nbytes + _SLACK:
        raise DestinationError(f"{destination} needs {nbytes / 1e9:.2f} GB, but {free / 1e9:.2f} GB are free")


@contextmanager
def staged(destination: Path) -> Iterator[Path]:
    """A directory to write into, which becomes the destination when the block ends and disappears if it raises."""
    temporary = destination.parent / f".{destination.name}.{secrets.token_hex(4)}.partial"
    try:
        temporary.mkdir()
        yield temporary
        for path in [*temporary.rglob("*"), temporary]:
            _sync(path)
        if os.path.lexists(destination):
            raise DestinationError(f"{destination} has appeared meanwhile: choose another destination")
        temporary.rename(destination)
        _sync(destination.parent)
    except OSError as error:
        raise DestinationError(f"cannot write {destination}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
