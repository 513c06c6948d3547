"""llama.cpp's own quantizers, from the library in the llama-cpp-python package."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

_ROW = 256
"""Numbers that are quantized as a row: the largest block. A matrix whose rows are no multiple of it is taken as one long row."""


def quantize(numbers: np.ndarray, kind: str, columns: int = _ROW, importance: np.ndarray | None = None) -> np.ndarray:
    """float32 of any shape, a multiple of 256 in all, to the blocks of a type, uint8 `[blocks, block_bytes]`. `importance` float32
    `[columns]` weighs the numbers of each row of so many. Raises `RuntimeError` without the library."""
    number = GGMLQuantizationType[kind]
    size, nbytes = GGML_QUANT_SIZES[number]
    flat = np.ascontiguousarray(numbers, np.float32).reshape(-1)
    blocks = np.zeros((flat.size // size, nbytes), np.uint8)
    weights = None if importance is None else np.ascontiguousarray(importance, np.float32)
    pointer = None if weights is None else weights.ctypes.data
    _library().ggml_quantize_chunk(int(number), flat.ctypes.data, blocks.ctypes.data, 0, flat.size // columns, columns, pointer)
    return blocks


@cache
def _library() -> ctypes.CDLL:
    package = find_spec("llama_cpp")
    names = ("libggml-base.so", "libggml-base.dylib")
    places = [Path(folder) / "lib" / name for folder in (package.submodule_search_locations or () if package else ()) for name in names]
    found = next((place for place in places if place.exists()), None)
    if found is None:
        raise RuntimeError("llama.cpp's quantizers are missing: pip install '.[bench]'")
    library = ctypes.CDLL(str(found))
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    return library
