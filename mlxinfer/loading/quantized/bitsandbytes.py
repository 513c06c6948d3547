"""bitsandbytes: nf4 and fp4 in blocks along the flattened matrix, with scales that may be quantized too, and LLM.int8 per row.

4 bits: `weight` uint8 has two codes a byte, the first in the high half. A code is an index in `weight.quant_map`, times `weight.absmax`
of its block. With "double quantization", `absmax` is a byte too: an index in `weight.nested_quant_map`, times `weight.nested_absmax` of
its own block, plus an offset. The JSON in `weight.quant_state.bitsandbytes__nf4` has the sizes. The sixteen values are not an affine
grid, so the matrix is unpacked. 8 bits: `weight` int8 and `SCB`, the largest absolute value of each row; MLX's affine format holds the
codes.
"""

from __future__ import annotations

import json
import math
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError
from ...nn.weights import Dense, Format, Matrix
from .groups import affine, group_in_mlx
from .stored import Block, Found, StoredTensors

_STATE = ".quant_state.bitsandbytes__"


class FourBitMatrix:
    """Implements `PackedMatrix`."""

    stored = mx.float32

    def __init__(self, tensors: StoredTensors, name: str, state: str) -> None:
        self._tensors, self._name = tensors, name
        self._state = _read_state(tensors, state)
        shape, self._block = self._state.get("shape"), cast("int", self._state.get("blocksize"))
        if not (isinstance(shape, list) and len(shape) == 2 and type(self._block) is int and self._block > 0):
            raise CheckpointError(f"{tensors.path}: {state} has no shape and blocksize")
        self.shape: tuple[int, ...] = (int(shape[0]), int(shape[1]))
        if tensors.info(name).nbytes * 2 != self.shape[0] * self.shape[1]:
            raise CheckpointError(f"{tensors.path}: {name} does not hold the {shape[0]} x {shape[1]} codes that {state} speaks of")
        if math.prod(tensors.info(f"{name}.absmax").shape) != -(-self.shape[0] * self.shape[1] // self._block):
            raise CheckpointError(f"{tensors.path}: {name}.absmax has not one scale for each block of {self._block}")
        endings = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
        self._nested = f"{name}.nested_absmax" in tensors
        self.parts = (name, state, *(f"{name}.{ending}" for ending in endings if f"{name}.{ending}" in tensors))
        self.kind = f"{state.rpartition('__')[2]} in blocks of {self._block}" + (", double quantization" if self._nested else "")

    def read(self, first: int, last: int) -> Matrix:
        columns = self.shape[1]
        start, stop = first * columns, last * columns
        at, end = start // 2, -(-stop // 2)
        codes = self._codes(at, end)[start - at * 2 : stop - at * 2]
        values = self._tensors.array(f"{self._name}.quant_map").astype(mx.float32)[mx.array(codes)]
        scales = self._scales()[mx.array(np.arange(start, stop) // self._block)]
        return Dense((values * scales).reshape(last - first, columns))

    def _codes(self, first: int, last: int) -> np.ndarray:
        """Codes in the bytes `first .. last`."""
        rows = self._tensors.info(self._name).shape[0] * 2 == self.shape[0] * self.shape[1]
        packed = self._tensors.codes(self._name, first, last) if rows else self._tensors.codes(self._name).reshape(-1)[first:last]
        packed = packed.reshape(-1)
        return np.stack([packed >> 4, packed & 0x0F], axis=-1).reshape(-1)

    def _scales(self) -> mx.array:
        """Float32 scale of each block of the matrix."""
        absmax = self._tensors.array(f"{self._name}.absmax")
        if not self._nested:
            return absmax.astype(mx.float32).reshape(-1)
        table, outer = (self._tensors.array(f"{self._name}.{part}").astype(mx.float32) for part in ("nested_quant_map", "nested_absmax"))
        blocks = mx.arange(absmax.size) // int(self._state.get("nested_blocksize", 256))
        return table[absmax.reshape(-1)] * outer[blocks] + float(self._state.get("nested_offset", 0.0))


class EightBitMatrix:
    """Implements `PackedMatrix`."""

    kind = "LLM.int8"

    def __init__(self, tensors: StoredTensors, base: str) -> None:
        self._tensors = tensors
        out, columns = tensors.info(f"{base}.weight").shape
        tensors.check(f"{base}.SCB", (out,))
        names = [f"{base}.{part}" for part in ("weight", "SCB", "weight_format")]
        self.parts = tuple(name for name in names if name in tensors)
        self.shape: tuple[int, ...] = (out, columns)
        size = group_in_mlx(columns, 1)
        self.stored: Format | mx.Dtype = Format(8, size) if size else mx.float32

    def read(self, first: int, last: int) -> Matrix:
        codes = self._tensors.codes(self.parts[0], first, last)
        scales = np.array(self._tensors.array(self.parts[1], first, last).astype(mx.float32))[:, None] / np.float32(127)
        if isinstance(self.stored, Format):
            return affine((codes ^ np.uint8(0x80)).view(np.uint32), scales, np.full((1, 1), 128), self.stored)
        return Dense(mx.array(codes.view(np.int8)).astype(mx.float32) * mx.array(scales))


def find(block: Block, tensors: StoredTensors) -> Found:
    """Return the matrices of a bitsandbytes checkpoint. Raises `CheckpointError`."""
    found: Found = {}
    for name in tensors.names():
        if _STATE in name:
            weight = name.partition(_STATE)[0]
            found[weight] = FourBitMatrix(tensors, weight, name)
        elif name.endswith(".SCB"):
            base = name.removesuffix(".SCB")
            found[f"{base}.weight"] = EightBitMatrix(tensors, base)
    return found


def _read_state(tensors: StoredTensors, name: str) -> dict[str, Any]:
    try:
        state = json.loads(tensors.codes(name).tobytes())
    except ValueError:
        state = None
    if not isinstance(state, dict):
        raise CheckpointError(f"{tensors.path}: {name} is no JSON object")
    return state
