"""The header of one GGUF file, read from a memory map without trusting any number in it.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. Counts and lengths are checked
against the rest of the file before anything is allocated: a corrupt file raises one `CheckpointError`.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import CheckpointError, UnsupportedModelError
from ...nn.weights import Format
from ...util.dataclass import dataclass
from ...util.plain_file import open_plain
from .types import TensorType, tensor_type

_LENGTH = 8
"""Bytes of the length before each string."""
_LEAST, _GUESS = 64, 24
"""Assumed bytes of a vocabulary's string with its length."""


def short_strings(buffer: mmap.mmap | bytes, at: int, count: int) -> tuple[list[str], int] | None:
    """Read `count` strings from `at` on, fast, and return them with their end.

    None for strings that this shortcut cannot read: empty, of 256 bytes or more, with a zero byte, truncated, or not UTF-8. Seven zero
    bytes in a row are the upper bytes of a length. That each length leads to the next is checked.
    """
    if count < _LEAST:
        return None
    room = count * _GUESS
    while True:
        window = np.frombuffer(buffer, np.uint8, min(room, len(buffer) - at), at)
        starts = _length_places(window, count)
        # One more than needed shows that the window has the whole last string.
        if len(starts) > count or len(window) < room:
            break
        room *= 2
    starts = starts[:count]
    if len(starts) < count or starts[0] != 0:
        return None
    ends = starts + _LENGTH + window[starts]
    if ends[-1] > len(window) or not np.array_equal(ends[:-1], starts[1:]):
        return None
    text = _zero_separated(window[: ends[-1]], starts)
    strings = [] if text is None else text.split("\0")
    return (strings, at + int(ends[-1])) if len(strings) == count else None


def _length_places(window: np.ndarray, most: int) -> np.ndarray:
    """Find places where seven zeros follow a byte: all, or the first of more than `most`."""
    zero = window == 0
    two = zero[:-1] & zero[1:]
    four = two[:-2] & two[2:]
    seven = four[1:-3] & four[4:]
    found, total = [np.zeros(0, np.int64)], 0
    for at in range(0, len(seven), _SCANNED):
        found.append(np.flatnonzero(seven[at : at + _SCANNED]) + at)
        total += len(found[-1])
        if total > most:
            break
    return np.concatenate(found)


_SCANNED = 1 << 22
"""Interval in bytes at which the places found so far are counted: each takes eight bytes."""


def _zero_separated(strings: np.ndarray, starts: np.ndarray) -> str | None:
    """The strings with a zero byte between them, which multi-byte characters never contain. None if not UTF-8."""
    keep = np.ones(len(strings), bool)
    for byte in range(_LENGTH - 1):
        keep[starts + byte] = False
    try:
        return strings[keep][1:].tobytes().decode()
    except UnicodeDecodeError:
        return None


MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_NESTING = 4
MAX_NAME = 1 << 16
MAX_KEYS, MAX_TENSORS, MAX_STRINGS, MAX_NESTED = 1 << 16, 1 << 18, 1 << 22, 1 << 16
"""More than any model has. As an object, each takes many times its bytes in the file."""

_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<B"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_DTYPES = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_ARRAY_HEADER = struct.Struct("<IQ")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Place of a tensor in its file."""

    name: str
    """llama.cpp's name."""
    shape: tuple[int, ...]
    """Row-major, as in numpy and Hugging Face."""
    type: TensorType
    offset: int
    """Bytes from the start of the file."""
    nbytes: int
    kept: Format | None = None
    """Format of a tensor that is returned in its blocks, undecoded; None for any other."""
    packed: bool = False
    """True if it is packed as in `mlx_formats.PACKINGS` even if that rounds. Otherwise only types that MLX has are packed."""

    @property
    def row_count(self) -> int:
        return math.prod(self.shape[:-1])


class GGUFFile:
    """One GGUF file with a parsed header: `metadata` and `tensors` by name. Data stays on disk until `pieces` reads it.

    Raises `CheckpointError` for a truncated or corrupt file, `UnsupportedModelError` for an unsupported version, byte order or tensor
    type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_plain(path) as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise CheckpointError(f"{path}: the file is empty; download it again") from None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
        try:
            header = _Header(self._map, path)
            self.metadata: dict[str, Any] = header.metadata
            self.tensors: Mapping[str, TensorInfo] = header.tensors
        except BaseException:
            self._map.close()
            raise

    def pieces(self, info: TensorInfo, rows: int) -> Iterator[np.ndarray]:
        """Yield the tensor's bytes, uint8 `[up to rows, bytes of a row]`: views of the map, each valid until the next.

        Pages that were read leave resident memory, so that reading a model does not keep the whole file there.
        """
        for first in range(0, info.row_count, rows):
            count = min(rows, info.row_count - first)
            yield self.rows(info, first, count)
            self.forget(info, first, count)

    def rows(self, info: TensorInfo, first: int, count: int) -> np.ndarray:
        """Some of the tensor's rows, uint8 `[count, bytes of a row]`, a view of the map."""
        width = info.nbytes // info.row_count
        return np.frombuffer(self._map, np.uint8, count * width, info.offset + first * width).reshape(count, width)

    def forget(self, info: TensorInfo, first: int, count: int) -> None:
        """Drop these rows from resident memory; reading them again is possible."""
        width = info.nbytes // info.row_count
        start = (info.offset + first * width) // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED, start, info.offset + (first + count) * width - start)

    def close(self) -> None:
        # A view in the traceback of an error keeps the map open until the view is gone.
        with suppress(BufferError):
            self._map.close()


_MAYBE_EMPTY = "rope_factors_"
"""Ollama's converter writes empty divisors for a rope that is not divided."""


class _Header:
    """A cursor over the map, and its findings."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self._buffer, self._path = buffer, path
        self._size = len(buffer)
        self._at = 0
        self._nested = 0
        self._part = "the header"
        tensor_count, key_count = self._counts()
        self.metadata = self._read_metadata(key_count)
        infos = self._read_tensor_infos(tensor_count)
        self.tensors = self._place(infos)

    def _fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {what}; the file is cut or corrupt, download it again")

    def _take(self, count: int) -> int:
        """Advance by `count` bytes and return their start."""
        at = self._at
        if count > self._size - at:
            raise CheckpointError(f"{self._path}: the file ends within {self._part}; it is cut or corrupt, download it again")
        self._at = at + count
        return at

    def _counts(self) -> tuple[int, int]:
        if self._buffer[: len(MAGIC)] != MAGIC[: self._size]:
            raise CheckpointError(f"{self._path}: not a GGUF file (it does not begin with GGUF)")
        self._take(len(MAGIC))
        version = self._u32()
        if version & 0xFFFF == 0 and version:
            raise UnsupportedModelError(
                f"{self._path}: a big-endian GGUF; convert it with gguf's gguf-convert-endian, or get a little-endian one"
            )
        if version not in (2, 3):
            raise UnsupportedModelError(f"{self._path}: GGUF version {version} is not supported, only 2 and 3; convert the model again")
        tensors, keys = self._u64(), self._u64()
        left = self._size - self._at
        if tensors > min(left // 24, MAX_TENSORS) or keys > min(left // 13, MAX_KEYS):
            raise self._fail(
                f"it claims {tensors} tensors and {keys} metadata keys, more than its {self._size} bytes can hold or any model has"
            )
        return tensors, keys

    def _u32(self) -> int:
        return int(_U32.unpack_from(self._buffer, self._take(4))[0])

    def _u64(self) -> int:
        return int(_U64.unpack_from(self._buffer, self._take(8))[0])

    def _string(self) -> str:
        length = self._u64()
        start = self._take(length)
        try:
            return self._buffer[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise self._fail(f"{self._part} is not UTF-8 text") from None

    def _name(self, kind: str) -> str:
        self._part = kind
        name = self._string()
        if not name or len(name) > MAX_NAME or not name.isprintable():
            raise self._fail(f"{kind} is {name[:40]!r}")
        return name

    def _read_metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for index in range(count):
            key = self._name(f"the name of metadata key {index}")
            if key in metadata:
                raise self._fail(f"metadata key {key} occurs twice")
            self._part = f"metadata key {key}"
            metadata[key] = self._value(self._u32(), 0)
        return metadata

    def _value(self, kind: int, depth: int) -> Any:
        scalar = _SCALARS.get(kind)
        if scalar is not None:
            value = scalar.unpack_from(self._buffer, self._take(scalar.size))[0]
            return bool(value) if kind == _BOOL else value
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(depth)
        raise self._fail(f"{self._part} has the unknown value type {kind}")

    def _array(self, depth: int) -> Any:
        kind, count = _ARRAY_HEADER.unpack_from(self._buffer, self._take(_ARRAY_HEADER.size))
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            if depth == MAX_NESTING:
                raise self._fail(f"{self._part} nests arrays deeper than {MAX_NESTING}")
            self._nested += count
            if self._nested > MAX_NESTED:
                raise self._fail(f"{self._part} claims {count} elements")
            return [self._array(depth + 1) for _ in range(count)]
        if kind not in _DTYPES:
            raise self._fail(f"{self._part} holds the unknown value type {kind}")
        dtype = np.dtype(_DTYPES[kind])
        start = self._take(count * dtype.itemsize)
        values = np.frombuffer(self._buffer, dtype, count, start)
        return values != 0 if kind == _BOOL else values.astype(dtype.newbyteorder("="))

    def _strings(self, count: int) -> list[str]:
        """Read an array of strings. Vocabularies have hundreds of thousands of entries, so the inner loop calls only the decoding."""
        buffer, at, size = self._buffer, self._at, self._size
        if count > min((size - at) // 8, MAX_STRINGS):
            raise self._fail(f"{self._part} claims {count} strings")
        found = short_strings(buffer, at, count)
        if found is not None:
            strings, self._at = found
            return strings
        unpack, last = _U64.unpack_from, size - 8
        strings = []
        append = strings.append
        try:
            for _ in range(count):
                if at > last:
                    break
                end = at + 8 + unpack(buffer, at)[0]
                if end > size:
                    break
                append(buffer[at + 8 : end].decode())
                at = end
        except UnicodeDecodeError:
            raise self._fail(f"entry {len(strings)} of {self._part} is not UTF-8 text") from None
        self._at = at
        if len(strings) != count:
            self._take(size)
        return strings

    def _read_tensor_infos(self, count: int) -> list[TensorInfo]:
        infos: list[TensorInfo] = []
        for index in range(count):
            name = self._name(f"the name of tensor {index}")
            self._part = f"the description of tensor {name}"
            dimensions = self._u32()
            if dimensions > MAX_DIMENSIONS:
                raise self._fail(f"tensor {name} has {dimensions} dimensions")
            shape = tuple(self._u64() for _ in range(dimensions))[::-1]
            kind = tensor_type(self._u32(), name, self._path)
            if name.startswith(_MAYBE_EMPTY) and not all(shape):
                self._u64()
                continue
            infos.append(TensorInfo(name, shape, kind, self._u64(), self._nbytes(name, shape, kind)))
        return infos

    def _nbytes(self, name: str, shape: tuple[int, ...], kind: TensorType) -> int:
        """Bytes of a tensor. Python's integers cannot overflow; `_place` refuses a tensor that exceeds the file."""
        if not all(shape):
            raise self._fail(f"tensor {name} has the empty shape {list(shape)}")
        row = shape[-1] if shape else 1
        if row % kind.block:
            raise self._fail(f"rows of {row} in tensor {name} are not whole {kind.name} blocks of {kind.block}")
        return math.prod(shape) // kind.block * kind.block_bytes

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise self._fail("general.alignment is not a power of two")
        return alignment

    def _place(self, infos: list[TensorInfo]) -> dict[str, TensorInfo]:
        """Convert offsets within the data to offsets within the file, and check that tensors do not overlap."""
        alignment = self._alignment()
        base = -(-self._at // alignment) * alignment
        placed: dict[str, TensorInfo] = {}
        end, before = base, "the header"
        for info in sorted(infos, key=lambda info: info.offset):
            start = base + info.offset
            if info.name in placed:
                raise self._fail(f"tensor {info.name} occurs twice")
            if info.offset % alignment:
                raise self._fail(f"tensor {info.name} starts at {info.offset}, which is not a multiple of the alignment {alignment}")
            if start < end:
                raise self._fail(f"tensor {info.name} overlaps {before}")
            end, before = start + info.nbytes, info.name
            if end > self._size:
                raise self._fail(f"tensor {info.name} ends at byte {end}, the file at {self._size}")
            placed[info.name] = TensorInfo(info.name, info.shape, info.type, start, info.nbytes)
        return {info.name: placed[info.name] for info in infos}
