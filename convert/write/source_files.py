"""The files of a conversion's source: what they were when it began, and whether they still are that."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ...errors import CheckpointError
from ...loading.fingerprint import model_files

_HEAD = 1 << 22
"""Bytes of a file that is no safetensors file which stand for its header: GGUF's metadata, all of a config."""
Stamp = tuple[int, int, int, str]
"""Size, time of the last change in nanoseconds, inode, digest of the header."""


class SourceFiles:
    """The weights and the JSON files at a resolved path, as they are now. Raises `CheckpointError` if one cannot be read."""

    def __init__(self, path: Path) -> None:
        self._files = model_files(path)
        self._stamps = [_stamp(file) for file in self._files]

    def key(self) -> dict[str, list[int | str]]:
        """By name: size, time and header; for a journal's key."""
        return {file.name: [size, time, head] for file, (size, time, _, head) in zip(self._files, self._stamps, strict=True)}

    def check(self, *, headers: bool = False) -> None:
        """Raise `CheckpointError` if a file has changed; `headers` are read again too."""
        for file, stamp in zip(self._files, self._stamps, strict=True):
            try:
                same = _stamp(file) == stamp if headers else _status(file) == stamp[:3]
            except CheckpointError:
                same = False
            if not same:
                raise CheckpointError(f"{file} was changed while it was converted: convert it again once nothing writes it")


def _status(file: Path) -> tuple[int, int, int]:
    try:
        found = file.stat()
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from None
    return found.st_size, found.st_mtime_ns, found.st_ino


def _stamp(file: Path) -> Stamp:
    status = _status(file)
    try:
        with file.open("rb") as opened:
            head = opened.read(8)
            length = int.from_bytes(head, "little") if file.suffix == ".safetensors" else _HEAD
            digest = hashlib.blake2b(head + opened.read(min(length, status[0])), digest_size=16).hexdigest()
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from None
    return (*status, digest)
