"""Safetensors shards: headers are written first, from known shapes, and tensors then arrive in pieces."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import mlx.core as mx
import numpy as np

from ..loading.directory import INDEX
from .mapper import Part

SHARD_BYTES = 5 << 30


class Writer:
    """Writes groups of parts (a matrix with its scales) in the order given. Raises OSError."""

    def __init__(self, directory: Path, groups: Sequence[Sequence[Part]], *, shard_bytes: int = SHARD_BYTES) -> None:
        self._directory = directory
        self._shards = _shards(groups, shard_bytes)
        self._shard_of = {part.name: number for number, shard in enumerate(self._shards) for part in shard}
        self._file: IO[bytes] | None = None
        self._number = -1
        self._at: dict[str, tuple[int, int]] = {}
        """By name: offsets of the next piece and of the tensor's end."""

    def append(self, part: Part, array: mx.array) -> None:
        """Write the next piece of a tensor. Pieces of one group's parts may alternate."""
        if self._shard_of[part.name] != self._number:
            self._open(self._shard_of[part.name])
        assert self._file is not None
        data = _bytes(array)
        start, end = self._at[part.name]
        assert start + len(data) <= end, f"{part.name} is longer than planned"
        _write_at(self._file.fileno(), data, start)
        self._at[part.name] = (start + len(data), end)

    def finish(self, parameters: int) -> None:
        """Close the last shard and write the index."""
        self._close()
        names = {name: self._shard_name(number) for name, number in sorted(self._shard_of.items())}
        size = sum(part.nbytes for shard in self._shards for part in shard)
        index = {"metadata": {"total_size": size, "total_parameters": parameters}, "weight_map": names}
        (self._directory / INDEX).write_text(json.dumps(index, indent=4), encoding="utf-8")

    def abandon(self) -> None:
        """Close without checking what is missing."""
        if self._file:
            self._file.close()
            self._file = None

    def _shard_name(self, number: int) -> str:
        count = len(self._shards)
        return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"

    def _open(self, number: int) -> None:
        self._close()
        header, offsets = _header(self._shards[number])
        self._file = (self._directory / self._shard_name(number)).open("xb")
        self._file.write(header)
        self._file.flush()
        self._number, self._at = number, offsets

    def _close(self) -> None:
        if self._file is None:
            return
        unfinished = [name for name, (start, end) in self._at.items() if start != end]
        assert not unfinished, f"{unfinished[0]} was not written completely"
        self._file.close()
        self._file = None


def _shards(groups: Sequence[Sequence[Part]], limit: int) -> list[list[Part]]:
    shards: list[list[Part]] = [[]]
    size = 0
    for group in groups:
        nbytes = sum(part.nbytes for part in group)
        if shards[-1] and size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1] += group
        size += nbytes
    return shards


def _header(parts: Sequence[Part]) -> tuple[bytes, dict[str, tuple[int, int]]]:
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


def _bytes(array: mx.array) -> memoryview:
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    return np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8).data


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
