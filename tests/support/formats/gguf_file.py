"""GGUF files byte by byte, so that tests can also write what no writer would."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

TYPES = {"u8": 0, "i8": 1, "u16": 2, "i16": 3, "u32": 4, "i32": 5, "f32": 6, "bool": 7, "string": 8, "array": 9}
TYPES |= {"u64": 10, "i64": 11, "f64": 12}
CODES = {"u8": "B", "i8": "b", "u16": "H", "i16": "h", "u32": "I", "i32": "i", "f32": "f", "bool": "B", "u64": "Q", "i64": "q", "f64": "d"}
F32 = 0


@dataclass(frozen=True)
class Typed:
    """A metadata value of a named type; `of` is the type of an array's elements."""

    kind: str
    value: Any
    of: str = ""


@dataclass(frozen=True)
class Tensor:
    """`shape` is row-major. `offset` overrides the place that follows from the tensors before."""

    name: str
    shape: tuple[int, ...]
    data: bytes
    type: int = F32
    offset: int | None = None


def array_tensor(name: str, values: np.ndarray) -> Tensor:
    return Tensor(name, values.shape, values.astype("<f4").tobytes())


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(typed: Typed) -> bytes:
    if typed.kind == "string":
        return string(typed.value)
    if typed.kind == "array":
        items = b"".join(value(item if isinstance(item, Typed) else Typed(typed.of, item)) for item in typed.value)
        return struct.pack("<IQ", TYPES[typed.of], len(typed.value)) + items
    return struct.pack("<" + CODES[typed.kind], typed.value)


def typed(item: Any) -> Typed:
    """The type that llama.cpp's converter would give it."""
    if isinstance(item, Typed):
        return item
    if isinstance(item, bool):
        return Typed("bool", item)
    if isinstance(item, (list, tuple)):
        return Typed("array", item, of=typed(item[0]).kind)
    return Typed({int: "u32", float: "f32", str: "string"}[type(item)], item)


def entry(key: str | bytes, item: Any) -> bytes:
    one = typed(item)
    return string(key) + struct.pack("<I", TYPES[one.kind]) + value(one)


def header(metadata: Mapping[str, Any], tensors: Iterable[Tensor], *, version: int = 3, counts: tuple[int, int] | None = None) -> bytes:
    tensors = list(tensors)
    alignment = typed(metadata.get("general.alignment", 32)).value
    tensor_count, key_count = counts or (len(tensors), len(metadata))
    text = b"GGUF" + struct.pack("<IQQ", version, tensor_count, key_count)
    text += b"".join(entry(key, item) for key, item in metadata.items())
    at = 0
    for tensor in tensors:
        offset = at if tensor.offset is None else tensor.offset
        dimensions = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape[::-1])
        text += string(tensor.name) + dimensions + struct.pack("<IQ", tensor.type, offset)
        at += padded(len(tensor.data), alignment)
    return text


def padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def encode(metadata: Mapping[str, Any], tensors: Iterable[Tensor] = (), **settings: Any) -> bytes:
    tensors = list(tensors)
    alignment = typed(metadata.get("general.alignment", 32)).value
    text = header(metadata, tensors, **settings)
    text = text.ljust(padded(len(text), alignment), b"\0")
    return text + b"".join(tensor.data.ljust(padded(len(tensor.data), alignment), b"\0") for tensor in tensors)


def write(path: Path, metadata: Mapping[str, Any], tensors: Iterable[Tensor] = (), **settings: Any) -> Path:
    path.write_bytes(encode(metadata, tensors, **settings))
    return path
