"""The destination directory appears complete, by a rename, or not at all. The progress of an interrupted run is kept in the same folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import DestinationError, MLXInferError
from .journal import STATES, Journal

_SLACK = 16 << 20


def check_destination(destination: Path) -> None:
    """Raise `DestinationError` if the destination exists or cannot be created. Missing parents are created later."""
    if os.path.lexists(destination):
        raise DestinationError(f"{destination} exists: choose another destination, or delete it")
    parent = _existing(destination)
    if not parent.is_dir():
        raise DestinationError(f"{parent} is not a directory: choose another destination")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise DestinationError(f"{parent} is not writable")


def _existing(path: Path) -> Path:
    """Return the nearest existing parent of a path."""
    return next(parent for parent in path.parents if os.path.lexists(parent))


@contextmanager
def made_parents(destination: Path) -> Iterator[None]:
    """Create the parents of the destination, and remove those that are empty at the end. Raises `DestinationError`."""
    missing = [parent for parent in destination.parents if not os.path.lexists(parent)]
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DestinationError(f"cannot create {destination.parent}: {error.strerror or error}") from None
    try:
        yield
    finally:
        for parent in missing:
            with suppress(OSError):  # not empty
                parent.rmdir()


def check_room(destination: Path, nbytes: int) -> None:
    """Raise `DestinationError` unless `nbytes` are free, counting the files of an interrupted run."""
    free = shutil.disk_usage(_existing(destination)).free
    needed = nbytes - _allocated(_staging(destination) / _FILES)
    if free < needed + _SLACK:
        raise DestinationError(f"{destination} needs {needed / 1e9:.2f} GB, but {free / 1e9:.2f} GB are free")


@dataclass(frozen=True, slots=True)
class Staging:
    """Files and journal of a running conversion."""

    files: Path
    """The directory that becomes the destination."""
    journal: Journal
    """Finished steps."""


_FILES = "files"


@contextmanager
def staged(destination: Path, key: Mapping[str, Any]) -> Iterator[Staging]:
    """Yield a directory to write into, which becomes the destination when the block ends.

    If the block is interrupted or the disk is full, the recorded steps stay in `.NAME.partial`. A run with the same `key` (everything that
    the result depends on) resumes there. Nothing stays after an `MLXInferError`, which the same run would meet again, or without recorded
    steps. Raises `DestinationError` for every OSError.
    """
    folder = _staging(destination)
    journal: Journal | None = None
    keep = False
    try:
        folder.mkdir(exist_ok=True)
        journal = Journal(folder, key)
        keep = True
        if not journal.resumed:
            _delete(folder / _FILES)
            _delete(folder / STATES)
        (folder / _FILES).mkdir(exist_ok=True)
        yield Staging(folder / _FILES, journal)
        _publish(folder / _FILES, destination)
        keep = False
    except OSError as error:
        why = f"cannot write {destination}: {error.strerror or error}"
        if keep and journal is not None and journal.count:
            why += f"; what is done stays in {folder}: make room and give the same command again, or delete it"
        raise DestinationError(why) from None
    except MLXInferError:
        keep = False
        raise
    finally:
        if journal is not None:
            journal.close()
            if not keep or not journal.count:
                _delete(folder)


def _staging(destination: Path) -> Path:
    return destination.parent / f".{destination.name}.partial"


def _publish(files: Path, destination: Path) -> None:
    for path in [*files.rglob("*"), files]:
        _sync(path)
    if os.path.lexists(destination):
        raise DestinationError(f"{destination} has appeared meanwhile: choose another destination")
    files.rename(destination)
    _sync(destination.parent)


def _delete(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _allocated(folder: Path) -> int:
    """Return the bytes on disk that the files take, without holes."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
