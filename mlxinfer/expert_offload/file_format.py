"""File of the routed experts of a model: one record per expert and layer, so that one aligned read fetches an expert.

The file is a header page and then the layers. A layer is a head (`_LAYER`, JSON, padding) and one record per expert. A record is the
concatenation of the expert's slices of all arrays of the layer, padded to a page. Layers follow one another without gaps. A layer's head is
written after its records: a walk from head to head finds the whole layers of an unfinished file.

The header has the digest of the source, the number of layers and the size of the file, which reveals a truncated one. It is written last:
an unfinished file has no valid header.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..util.cache_files import is_checked, mark_safe
from ..util.dataclass import dataclass
from ..util.uncached_file import PAGE, drop_pages, whole_pages

_HEADER = struct.Struct("<8sIIQ32s")
"""Magic, version, count of layers, bytes of the file, SHA-256 of the source."""
_MAGIC, _VERSION = b"mlxiexpt", 1
_LAYER = struct.Struct("<8sIIQ")
"""Magic, bytes of the JSON, CRC-32 of the JSON, bytes of head and records."""
_LAYER_MAGIC = b"mlxilayr"
_PIECE = 8 << 20
"""Bytes read at a time where checksums are verified."""

Source = Mapping[str, Any]
"""Files and layout that an expert file is made for, in JSON's types. A file is valid for an equal source only."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array of a layer."""

    name: str
    dtype: str
    """Name in `mlx.core`, such as uint32 or bfloat16."""
    shape: tuple[int, ...]
    """Shape for one expert, without the leading axis."""

    @property
    def nbytes(self) -> int:
        """Bytes of one expert."""
        return int(prod(self.shape)) * self.mlx_dtype.size

    @property
    def mlx_dtype(self) -> mx.Dtype:
        dtype = getattr(mx, self.dtype, None)
        if not isinstance(dtype, mx.Dtype):
            raise ValueError(f"{self.dtype} is not a dtype")
        return dtype


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """The experts of one layer in the file."""

    key: str
    experts: int
    arrays: tuple[ArraySpec, ...]
    """Arrays of the layer with the leading axis `experts`, in the order of a record."""
    offset: int
    """First byte of the first record."""
    stride: int
    """Bytes from one record to the next, a multiple of `PAGE`."""
    meta: Mapping[str, Any]
    """Notes of the writer's caller, in JSON's types."""
    checksums: tuple[int, ...]
    """CRC-32 of each record, without its padding."""

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert, without padding."""
        return sum(each.nbytes for each in self.arrays)

    @property
    def end(self) -> int:
        return self.offset + self.experts * self.stride


def stride_of(arrays: tuple[ArraySpec, ...]) -> int:
    """Bytes of a record with these arrays in the file."""
    return whole_pages(sum(each.nbytes for each in arrays))


def place_layer(begin: int, key: str, experts: int, arrays: tuple[ArraySpec, ...], meta: Mapping[str, Any]) -> LayerRecord:
    """Return the layer whose head starts at `begin`, with checksums of 0."""
    nothing = LayerRecord(key, experts, arrays, 0, stride_of(arrays), meta, (0,) * experts)
    return LayerRecord(key, experts, arrays, begin + _head_bytes(nothing), nothing.stride, meta, nothing.checksums)


def encode_layer(layer: LayerRecord) -> bytes:
    """Return the layer's head. Checksums have a fixed length, so that their values do not change the head's size."""
    text = _layer_text(layer)
    size = _head_bytes(layer)
    return (_LAYER.pack(_LAYER_MAGIC, len(text), zlib.crc32(text), size + layer.experts * layer.stride) + text).ljust(size, b"\0")


def _head_bytes(layer: LayerRecord) -> int:
    return whole_pages(_LAYER.size + len(_layer_text(layer)))


def _layer_text(layer: LayerRecord) -> bytes:
    value = {
        "key": layer.key,
        "experts": layer.experts,
        "arrays": [[each.name, each.dtype, list(each.shape)] for each in layer.arrays],
        "meta": layer.meta,
        "checksums": [f"{each:08x}" for each in layer.checksums],
    }
    return json.dumps(value).encode()


def encode_header(source: Source, layers: int, size: int) -> bytes:
    return _HEADER.pack(_MAGIC, _VERSION, layers, size, _digest(source)).ljust(PAGE, b"\0")


def encode_unfinished(source: Source) -> bytes:
    """Return the header of an unfinished file, which names its source and is not valid otherwise."""
    return encode_header(source, 0, 0)


def is_unfinished(descriptor: int, source: Source) -> bool:
    """True if the file was begun for this source. Raises OSError."""
    return os.pread(descriptor, PAGE, 0) == encode_unfinished(source)


def _digest(source: Source) -> bytes:
    return hashlib.sha256(json.dumps(source, sort_keys=True).encode()).digest()


def walk_layers(descriptor: int) -> Iterator[LayerRecord]:
    """Yield the layers of a file, up to the first that is not whole. Raises OSError."""
    begin, size = PAGE, os.fstat(descriptor).st_size
    while (layer := _read_layer(descriptor, begin, size)) is not None:
        yield layer
        begin = layer.end


def _read_layer(descriptor: int, begin: int, file_size: int) -> LayerRecord | None:
    head = os.pread(descriptor, PAGE, begin)
    if len(head) < PAGE:
        return None
    magic, length, checksum, size = _LAYER.unpack_from(head)
    if magic != _LAYER_MAGIC or begin + size > file_size or _LAYER.size + length > size:
        return None
    text = head[_LAYER.size : _LAYER.size + length]
    if len(text) < length:
        text += os.pread(descriptor, length - len(text), begin + PAGE)
    if zlib.crc32(text) != checksum:
        return None
    try:
        return _decoded_layer(json.loads(text), begin, size)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None


def _decoded_layer(value: Any, begin: int, size: int) -> LayerRecord | None:
    arrays = tuple(ArraySpec(str(name), str(dtype), tuple(int(n) for n in shape)) for name, dtype, shape in value["arrays"])
    checksums = tuple(int(each, 16) for each in value["checksums"])
    placed = place_layer(begin, str(value["key"]), int(value["experts"]), arrays, dict(value["meta"]))
    fits = placed.end == begin + size and len(checksums) == placed.experts > 0 and placed.expert_bytes > 0
    found = LayerRecord(placed.key, placed.experts, arrays, placed.offset, placed.stride, placed.meta, checksums)
    return found if fits else None


class ExpertFile:
    """An open file of experts. Removing or replacing the file does not affect an open one."""

    def __init__(self, path: Path, descriptor: int, layers: Mapping[str, LayerRecord]) -> None:
        self.path, self.descriptor = path, descriptor
        self.layers = layers
        """By key, in the order of the file."""

    @classmethod
    def open(cls, path: Path, source: Source) -> ExpertFile | None:
        """Open a whole file that was made for `source`; None if there is none.

        A file whose checksums are not known to be right is read whole once, a second or so per gigabyte.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        with suppress(OSError):
            layers = _valid_layers(descriptor, source)
            if layers and (is_checked(path) or _verified(path, descriptor, layers)):
                return cls(path, descriptor, {layer.key: layer for layer in layers})
        os.close(descriptor)
        return None

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts of all layers in memory."""
        return sum(layer.experts * layer.expert_bytes for layer in self.layers.values())

    def close(self) -> None:
        """Close the file. A closed file stays closed."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _valid_layers(descriptor: int, source: Source) -> list[LayerRecord]:
    """Return the layers of a whole file for this source; empty for any other file. Raises OSError."""
    size = os.fstat(descriptor).st_size
    head = os.pread(descriptor, PAGE, 0)
    if len(head) < PAGE:
        return []
    layers = list(walk_layers(descriptor))
    whole = bool(layers) and layers[-1].end == size and head == encode_header(source, len(layers), size)
    return layers if whole and len({layer.key for layer in layers}) == len(layers) else []


def _verified(path: Path, descriptor: int, layers: list[LayerRecord]) -> bool:
    """Compare all checksums, and record that they are right. Raises OSError."""
    for layer in layers:
        for expert, checksum in enumerate(layer.checksums):
            if checksum_at(descriptor, layer.offset + expert * layer.stride, layer.expert_bytes) != checksum:
                return False
    with suppress(OSError):  # a folder that cannot be written costs another check
        mark_safe(path)
    return True


def checksum_at(descriptor: int, offset: int, nbytes: int) -> int:
    """CRC-32 of `nbytes` bytes at `offset`. The bytes do not stay in the system's cache. Raises OSError."""
    checksum, at = 0, offset
    while at < offset + nbytes and (piece := os.pread(descriptor, min(_PIECE, offset + nbytes - at), at)):
        checksum = zlib.crc32(piece, checksum)
        at += len(piece)
    drop_pages(descriptor, offset, nbytes)
    return checksum


def expert_bytes(array: mx.array | np.ndarray) -> np.ndarray:
    """Return the bytes of an array `[experts, ...]` as uint8 `[experts, bytes]`, without a copy where the array is contiguous."""
    if isinstance(array, mx.array):
        flat = array.reshape(len(array), -1).view(mx.uint8)
        mx.eval(flat)
        return np.array(flat, copy=False)
    return np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)
