"""Writes safetensors shards. Headers are written first, from known shapes; tensors arrive in pieces, in any order."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import mlx.core as mx
import numpy as np

from ...loading.directory import INDEX
from ..args import SHARD_BYTES
from ..plan.stored_part import StoredPart
from .journal import Span, new_digest


class _Open:
    """A tensor being written."""

    __slots__ = ("at", "digest")

    def __init__(self, at: int) -> None:
        self.at = at
        self.digest = new_digest()


class ShardWriter:
    """Writes parts (a matrix, its scales) into shards in the order of `groups`. Raises OSError.

    Shards left by an interrupted run are continued.
    """

    def __init__(self, directory: Path, groups: Sequence[Sequence[StoredPart]], *, shard_bytes: int = SHARD_BYTES) -> None:
        self._directory = directory
        self._shards = _shards(groups, shard_bytes)
        self._shard_of = {part.name: number for number, shard in enumerate(self._shards) for part in shard}
        self._headers = [_header(shard) for shard in self._shards]
        self._file: IO[bytes] | None = None
        self._number = -1
        self._open: dict[str, _Open] = {}
        self._complete: set[str] = set()

    def append(self, part: StoredPart, array: mx.array) -> None:
        """Write the next piece of a tensor. Pieces of several parts may alternate."""
        start, end = self._place(part)
        piece = self._open.setdefault(part.name, _Open(start))
        data = bytes_of(array)
        assert piece.at + len(data) <= end, f"{part.name} is longer than planned"
        _write_at(self._shard(self._shard_of[part.name]).fileno(), data, piece.at)
        piece.digest.update(data)
        piece.at += len(data)

    def spans(self, parts: Iterable[StoredPart]) -> list[Span]:
        """Return the bytes of these complete parts in their files, for a journal in the same folder."""
        found = []
        for part in parts:
            start, end = self._place(part)
            piece = self._open.get(part.name) or _Open(start)
            assert piece.at == end, f"{part.name} was not written completely"
            self._open.pop(part.name, None)
            file = f"{self._directory.name}/{self._shard_name(self._shard_of[part.name])}"
            found.append(Span(file, start, end, piece.digest.hexdigest()))
            self._complete.add(part.name)
        return found

    def skip(self, parts: Iterable[StoredPart]) -> None:
        """Count these parts as written by an earlier run."""
        self._complete.update(part.name for part in parts)

    def finish(self, parameters: int, others: Mapping[str, Sequence[StoredPart]] = {}) -> None:
        """Close the files and write the index. `others` are tensors of further files, by the name of the file."""
        self.spans(part for shard in self._shards for part in shard if part.name not in self._complete)
        for number in range(len(self._shards)):
            self._shard(number)
        self.close()
        names = {name: self._shard_name(number) for name, number in sorted(self._shard_of.items())}
        size = sum(part.nbytes for shard in (*self._shards, *others.values()) for part in shard)
        names |= {part.name: file for file, parts in others.items() for part in parts}
        index = {"metadata": {"total_size": size, "total_parameters": parameters}, "weight_map": names}
        (self._directory / INDEX).write_text(json.dumps(index, indent=4), encoding="utf-8")

    def close(self) -> None:
        """Close without checking what is missing."""
        if self._file:
            self._file.close()
            self._file = None
            self._number = -1

    def _place(self, part: StoredPart) -> tuple[int, int]:
        return self._headers[self._shard_of[part.name]][1][part.name]

    def _shard_name(self, number: int) -> str:
        count = len(self._shards)
        return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"

    def _shard(self, number: int) -> IO[bytes]:
        """Return the open file of a shard, with its header in place and its final length."""
        if self._file is None or number != self._number:
            self.close()
            header, places = self._headers[number]
            descriptor = os.open(self._directory / self._shard_name(number), os.O_RDWR | os.O_CREAT, 0o666)
            self._file = os.fdopen(descriptor, "r+b", buffering=0)
            _write_at(descriptor, memoryview(header), 0)
            os.ftruncate(descriptor, max((end for _, end in places.values()), default=len(header)))
            self._number = number
        return self._file


def _shards(groups: Sequence[Sequence[StoredPart]], limit: int) -> list[list[StoredPart]]:
    shards: list[list[StoredPart]] = [[]]
    size = 0
    for group in groups:
        nbytes = sum(part.nbytes for part in group)
        if shards[-1] and size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1] += group
        size += nbytes
    return shards


def _header(parts: Sequence[StoredPart]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Return the bytes before the tensors, and each tensor's first and last offset in the file."""
    entries: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for part in parts:
        entries[part.name] = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": [end, end + part.nbytes]}
        end += part.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    origin = 8 + len(text)
    starts = {part.name: entries[part.name]["data_offsets"] for part in parts}
    return len(text).to_bytes(8, "little") + text, {name: (origin + a, origin + b) for name, (a, b) in starts.items()}


def bytes_of(array: mx.array) -> memoryview:
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    return np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8).data


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
