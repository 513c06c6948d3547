"""Reads the source of a conversion in blocks of rows, and notices if its files change."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import mlx.core as mx

from ...errors import CheckpointError
from ...loading.checkpoint import Checkpoint
from ...loading.directory import SafetensorsCheckpoint
from ...loading.find.fingerprint import model_files
from ...loading.weights import TensorRequest, evaluate
from ...nn.weights import Matrix, map_rows, stack

BLOCK = 1 << 24
"""Elements per block; a single row or expert may be larger."""


def can_read_rows(checkpoint: Checkpoint, request: TensorRequest) -> bool:
    """True if the tensor can be read in parts: a safetensors tensor, or several that are stacked."""
    plain = request.recipe is None or request.recipe.make is stack
    return plain and isinstance(checkpoint, SafetensorsCheckpoint) and bool(request.shape)


def blocks(checkpoint: Checkpoint, request: TensorRequest, size: int | None = None) -> Iterator[Matrix]:
    """Yield the tensor in order in blocks `[rows, in]` (one axis for a vector) of about `size` elements, by default `BLOCK`.

    One block is in memory at a time, unless the tensor must be read whole.
    """
    size = BLOCK if size is None else size
    if can_read_rows(checkpoint, request):
        assert isinstance(checkpoint, SafetensorsCheckpoint)
        shape = request.shape if request.recipe is None else request.shape[1:]
        for source in request.sources:
            for first, last in _ranges(shape[0], math.prod(shape[1:]), size):
                yield _flat(checkpoint.read_rows(source, first, last))
        return
    matrix = _whole(checkpoint, request)
    rows = matrix.shape[0] if matrix.shape else 1
    for first, last in _ranges(rows, math.prod(matrix.shape[1:]), size):
        yield map_rows(matrix, partial(_rows, first=first, last=last))


def _rows(array: mx.array, first: int, last: int) -> mx.array:
    return array[first:last] if array.ndim else array


def _whole(checkpoint: Checkpoint, request: TensorRequest) -> Matrix:
    sources = [checkpoint.read(source) for source in request.sources]
    matrix = sources[0] if request.recipe is None else request.recipe.make(sources)
    return _flat(evaluate(matrix))


def _flat(matrix: Matrix) -> Matrix:
    return map_rows(matrix, lambda array: array.reshape(-1, array.shape[-1])) if len(matrix.shape) > 2 else matrix


def _ranges(rows: int, row: int, size: int) -> Iterator[tuple[int, int]]:
    step = max(1, size // max(row, 1))
    return ((first, min(first + step, rows)) for first in range(0, rows, step))


_HEAD = 1 << 22
"""Bytes that count as the header of other files than safetensors: GGUF's metadata, all of a config."""
Stamp = tuple[int, int, int, str]
"""Size, modification time in nanoseconds, inode, and digest of the header."""


class SourceFiles:
    """State of the weights and JSON files at a resolved path. Raises `CheckpointError` if one cannot be read."""

    def __init__(self, path: Path) -> None:
        self._files = model_files(path)
        self._stamps = [_stamp(file) for file in self._files]

    def key(self) -> dict[str, list[int | str]]:
        """Return size, time and header digest by name, for a journal's key."""
        return {file.name: [size, time, head] for file, (size, time, _, head) in zip(self._files, self._stamps, strict=True)}

    def check(self, *, headers: bool = False) -> None:
        """Raise `CheckpointError` if a file has changed; with `headers`, headers are read again too."""
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
