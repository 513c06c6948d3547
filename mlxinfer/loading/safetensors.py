"""The safetensors format. Opening a file checks its whole header; tensors are read one at a time.

Layout: a little-endian 64-bit length, a JSON object of that many bytes, then the tensors. Reading a tensor releases the pages of the
file that it touched, so that resident memory stays near what the caller holds.
"""

from __future__ import annotations

import json
import math
import mmap
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError
from ..util.dataclass import dataclass
from ..util.plain_file import open_plain

MAX_HEADER = 100_000_000
"""Bytes; the limit of the reference implementation."""
_MAX_DIMS = 16
_MAX_SIZE = 2**31 - 1

_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
_NUMPY = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8", "I64": "<i8",
    "F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8", "F8_E4M3": "u1", "F8_E5M2": "u1",
}  # fmt: skip
DTYPES = {
    "BOOL": mx.bool_, "U8": mx.uint8, "I8": mx.int8, "U16": mx.uint16, "I16": mx.int16, "U32": mx.uint32, "I32": mx.int32,
    "U64": mx.uint64, "I64": mx.int64, "F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32, "F64": mx.float32,
    "F8_E4M3": mx.bfloat16, "F8_E5M2": mx.bfloat16,
}  # fmt: skip
"""Dtype that `read` returns for each stored dtype: 8-bit floats exactly in bfloat16, 64-bit floats rounded to 32."""


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """An entry of the header."""

    name: str
    dtype: str
    """Name in the file, such as BF16."""
    shape: tuple[int, ...]
    start: int
    """First byte, from the start of the file."""
    stop: int
    """Byte after the last one."""

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class SafetensorsFile:
    """An open file. Raises `CheckpointError` if the header is damaged, or does not account for every byte of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_plain(path) as file:
                size = file.seek(0, 2)
                file.seek(0)
                length, header = _read_header(path, file.read(8), size, file)
                self.tensors = _parse(path, header, 8 + length, size)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None

    def read(self, name: str) -> mx.array:
        """Read a tensor, evaluated, without sharing memory with the file."""
        info = self.tensors[name]
        return self._read(info, info.start, info.shape)

    def read_rows(self, name: str, first: int, last: int) -> mx.array:
        """Read the rows `first .. last` of the first axis, evaluated, without sharing memory with the file."""
        info = self.tensors[name]
        row = info.nbytes // info.shape[0]
        return self._read(info, info.start + first * row, (last - first, *info.shape[1:]))

    def read_codes(self, name: str, first: int, last: int) -> np.ndarray[Any, Any]:
        """Read rows as unsigned integers of the item's size, whatever their dtype. A scalar has one row."""
        info = self.tensors[name]
        size, shape = _BITS[info.dtype] // 8, info.shape or (1,)
        row = info.nbytes // max(shape[0], 1)
        start, count = info.start + first * row, (last - first) * row
        bytes_of_rows = np.frombuffer(self._map, dtype=np.uint8, count=count, offset=start)
        codes: np.ndarray = bytes_of_rows.copy().view(f"<u{size}").reshape(last - first, *shape[1:])
        del bytes_of_rows
        self._give_back(start, count)
        return codes

    def close(self) -> None:
        self._map.close()

    def _read(self, info: HeaderEntry, start: int, shape: tuple[int, ...]) -> mx.array:
        if info.dtype not in _NUMPY:
            raise CheckpointError(f"{self.path}: tensor {info.name!r} is stored as {info.dtype}, which cannot be read")
        count = math.prod(shape)
        stored = np.frombuffer(self._map, dtype=_NUMPY[info.dtype], count=count, offset=start).reshape(shape)
        array = _to_mlx(stored, info.dtype)
        mx.eval(array)
        nbytes = stored.nbytes
        del stored
        self._give_back(start, nbytes)
        return array

    def _give_back(self, start: int, nbytes: int) -> None:
        first = start - start % mmap.PAGESIZE
        if nbytes and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, start + nbytes - first)


def _to_mlx(stored: np.ndarray[Any, Any], dtype: str) -> mx.array:
    if dtype == "F64":
        return mx.array(stored.astype(np.float32))
    if dtype == "F8_E4M3":
        return mx.from_fp8(mx.array(stored), mx.bfloat16)
    if dtype == "F8_E5M2":
        return (mx.array(stored).astype(mx.uint16) << 8).view(mx.float16).astype(mx.bfloat16)
    array = mx.array(stored)
    return array.view(mx.bfloat16) if dtype == "BF16" else array


def _read_header(path: Path, prefix: bytes, size: int, file: Any) -> tuple[int, Any]:
    length = int.from_bytes(prefix, "little")
    if size < 8 or length > size - 8:
        raise CheckpointError(f"{path} is truncated: its header does not fit in {size} bytes; download or copy it again")
    if length > MAX_HEADER:
        raise CheckpointError(f"{path} is not a safetensors file: its header would have {length} bytes")
    text = file.read(length)
    if not text.startswith(b"{"):
        raise CheckpointError(f"{path} is not a safetensors file: its header is not a JSON object")
    try:
        return length, json.loads(text.decode(), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is corrupt: its header is not valid JSON; download or copy it again") from None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("duplicate key")
    return unique


def _parse(path: Path, header: dict[str, Any], origin: int, size: int) -> dict[str, HeaderEntry]:
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path} is corrupt: its __metadata__ is not a map of strings; download or copy it again")
    tensors = [_entry(path, name, entry, origin) for name, entry in header.items()]
    end = origin
    for info in sorted(tensors, key=lambda info: (info.start, info.stop)):
        if info.start != end:
            raise CheckpointError(f"{path} is corrupt: tensor {info.name!r} overlaps another one or leaves a hole before it")
        end = info.stop
    if end > size:
        raise CheckpointError(f"{path} is truncated: {end} bytes are expected, {size} are there; download or copy it again")
    if end < size:
        raise CheckpointError(f"{path} is corrupt: {size - end} bytes follow its last tensor; download or copy it again")
    return {info.name: info for info in tensors}


def _entry(path: Path, name: str, entry: Any, origin: int) -> HeaderEntry:
    def corrupt(why: str) -> CheckpointError:
        return CheckpointError(f"{path} is corrupt: tensor {name!r} {why}; download or copy it again")

    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise corrupt("has no dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise corrupt(f"has the unknown dtype {dtype!r}"[:200])
    if not _naturals(shape) or len(shape) > _MAX_DIMS or any(dim > _MAX_SIZE for dim in shape):
        raise corrupt("has an impossible shape")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise corrupt("has impossible offsets")
    if (offsets[1] - offsets[0]) * 8 != math.prod(shape) * _BITS[dtype]:
        raise corrupt(f"of shape {shape} does not fill its {offsets[1] - offsets[0]} bytes")
    return HeaderEntry(name, dtype, tuple(shape), origin + offsets[0], origin + offsets[1])


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
