"""compressed-tensors and modelopt, whose tensors tell the format of each matrix.

`weight_packed` int32 has codes raised by half their number, with `weight_scale`, perhaps `weight_zero_point` (packed along the outputs),
`weight_shape` and `weight_g_idx`. As bytes with 8-bit scales it is NVFP4 or MXFP4. `weight` is int8 or an 8-bit float with
`weight_scale`. modelopt has NVFP4 as `weight` in bytes with `weight_scale` and `weight_scale_2`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError, UnsupportedModelError
from ...nn.weights import Format, Matrix
from .fp4 import MXFP4Matrix, NVFP4Matrix
from .fp8 import find as find_fp8
from .groups import affine, dense, group_in_mlx, unpack
from .stored import Block, Found, PackedMatrix, StoredTensors

_FORMATS = {"pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized",
            "mixed-precision", "dense"}  # fmt: skip
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "MIXED_PRECISION")
_BITS = (2, 4, 8)


class IntegerMatrix:
    """Implements `PackedMatrix` for signed integers, packed into words or one a byte."""

    def __init__(self, tensors: StoredTensors, base: str, *, packed: bool) -> None:
        self._tensors, self._base = tensors, base
        self._codes = f"{base}.weight_packed" if packed else f"{base}.weight"
        out, width = tensors.info(self._codes).shape
        if packed:
            tensors.check(f"{base}.weight_shape", (2,))
        columns = cast("int", tensors.array(f"{base}.weight_shape")[1].item()) if packed else width
        self._bits = width * 32 // columns if packed and columns else 8
        if self._bits not in _BITS or (packed and width * 32 != columns * self._bits):
            raise UnsupportedModelError(f"{tensors.path}: {base} packs {columns} numbers into {width} words, which cannot be read")
        self.shape: tuple[int, ...] = (out, columns)
        scale = tensors.info(f"{base}.weight_scale").shape
        self._groups = scale[1] if len(scale) == 2 else 1
        tensors.check(f"{base}.weight_scale", (out, self._groups), (out,), (1,), ())
        endings = ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
        names = (f"{base}.{ending}" for ending in endings)
        self.parts = (self._codes, *(name for name in names if name in tensors))
        self.kind = f"integers of {self._bits} bits" + (f" in groups of {columns // self._groups}" if self._groups > 1 else "")

    @cached_property
    def stored(self) -> Format | mx.Dtype:
        size = group_in_mlx(self.shape[1], self._groups) if np.array_equal(self._group_of, self._in_order) else None
        return Format(self._bits, size) if size else mx.float32

    def read(self, first: int, last: int) -> Matrix:
        words = np.ascontiguousarray(self._tensors.codes(self._codes, first, last))
        if self._codes.endswith(".weight"):
            words = (words ^ np.uint8(0x80)).view(np.uint32)
        out = self.shape[0]
        scales = np.array(self._tensors.array(f"{self._base}.weight_scale").astype(mx.float32)).reshape(-1, self._groups)
        scales = np.broadcast_to(scales, (out, self._groups))[first:last]
        zeros = np.broadcast_to(self._zeros(), (out, self._groups))[first:last]
        if isinstance(self.stored, Format):
            return affine(words, scales, zeros, self.stored)
        return dense(unpack(words, self._bits), scales, zeros, self._group_of)

    def _zeros(self) -> np.ndarray:
        """Zero points of codes that start at zero, `[out or 1, groups or 1]`."""
        name, half = f"{self._base}.weight_zero_point", 2 ** (self._bits - 1)
        if name not in self._tensors:
            return np.full((1, 1), half, np.int32)
        if self._tensors.info(name).dtype != "I32":
            zeros: np.ndarray = self._tensors.codes(name).view(np.int8).astype(np.int32).reshape(-1, self._groups) + half
            return zeros
        packed = self._tensors.codes(name).reshape(-1, self._groups)
        found: np.ndarray = unpack(np.ascontiguousarray(packed.T), self._bits).T[: self.shape[0]].astype(np.int32)
        return found

    @cached_property
    def _group_of(self) -> np.ndarray:
        name = f"{self._base}.weight_g_idx"
        if name not in self._tensors:
            return self._in_order
        self._tensors.check(name, (self.shape[1],))
        group_of = self._tensors.codes(name).view(np.int32)
        if not 0 <= group_of.min() <= group_of.max() < self._groups:
            raise CheckpointError(f"{self._tensors.path}: {name} names a group that is not there")
        return group_of

    @property
    def _in_order(self) -> np.ndarray:
        return (np.arange(self.shape[1]) // -(-self.shape[1] // self._groups)).astype(np.int32)


def find(block: Block, tensors: StoredTensors) -> Found:
    """Return the matrices of a compressed-tensors checkpoint. Raises `UnsupportedModelError` for unknown formats."""
    groups: dict[str, Any] = block.get("config_groups") or {}
    formats = {str(name) for name in (block.get("format"), *(group.get("format") for group in groups.values())) if name}
    sparsity = (block.get("sparsity_config") or {}).get("format", "dense")
    unknown = sorted(formats - _FORMATS) or ([sparsity] if sparsity != "dense" else [])
    if unknown or block.get("transform_config"):
        what = f"the format {unknown[0]!r}" if unknown else "transforms"
        raise UnsupportedModelError(f"{tensors.path}: {what} of compressed-tensors cannot be read, only {', '.join(sorted(_FORMATS))}")
    return _found(_block_of(block, groups), tensors)


def find_modelopt(block: Block, tensors: StoredTensors) -> Found:
    """Return the matrices of a checkpoint of NVIDIA's modelopt; see `find`."""
    inner: Any = block.get("quantization") or block
    algorithm = inner.get("quant_algo")
    if algorithm not in _ALGORITHMS:
        raise UnsupportedModelError(f"{tensors.path}: modelopt's {algorithm} cannot be read, only {', '.join(_ALGORITHMS)}")
    return _found({}, tensors)


def _block_of(block: Block, groups: dict[str, Any]) -> dict[str, Any]:
    sizes = [(group.get("weights") or {}).get("block_structure") for group in groups.values()]
    return {"weight_block_size": next((size for size in sizes if size), None)}


def _found(block: Block, tensors: StoredTensors) -> Found:
    found = find_fp8(block, tensors)
    for name in tensors.names():
        base, _, last = name.rpartition(".")
        if last in ("weight", "weight_packed") and f"{base}.weight_scale" in tensors and f"{base}.weight" not in found:
            found[f"{base}.weight"] = _matrix(tensors, base, name)
    return found


def _matrix(tensors: StoredTensors, base: str, name: str) -> PackedMatrix:
    dtype, scale = tensors.info(name).dtype, f"{base}.weight_scale"
    if dtype == "U8":
        for ending, divides in (("weight_scale_2", False), ("weight_global_scale", True)):
            if f"{base}.{ending}" in tensors:
                return NVFP4Matrix(tensors, name, scale, f"{base}.{ending}", divides=divides)
        return MXFP4Matrix(tensors, name, scale)
    if dtype in ("I32", "I8"):
        return IntegerMatrix(tensors, base, packed=dtype == "I32")
    raise UnsupportedModelError(f"{tensors.path}: {name} is stored as {dtype} with a scale, which cannot be read")
