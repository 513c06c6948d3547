"""8-bit floats with scales: blocks of 128 x 128 (DeepSeek, Qwen), or scales per tensor or per row, in any number of dimensions.

A number is `code * scale`, with the scale in `weight_scale_inv` or `weight_scale`. Scales that are powers of two by declaration
(`scale_fmt` "ue8m0", or stored as F8_E8M0) make it MLX's mxfp8 without changing a bit: groups of 32 repeat the scales. MLX has no format
for other scales. The CPU kernels multiply E4M3 codes with a scale for each row and group of columns (`FLOAT8`); otherwise the matrix is
unpacked.
"""

from __future__ import annotations

from math import gcd

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError, WeightsError
from ...nn.weights import FLOAT8, Dense, Format, Matrix, Quantized
from ..formats import FIXED
from .stored import Block, Found, StoredTensors

FLOATS = ("F8_E4M3", "F8_E5M2")
_BLOCK = (128, 128)
_SCALES = ("_scale_inv", "_scale")


class FP8Matrix:
    """Implements `PackedMatrix`."""

    def __init__(self, tensors: StoredTensors, name: str, scale: str, block: tuple[int, int], powers: bool) -> None:
        self._tensors, self._name, self._scale = tensors, name, scale
        info, of_scale = tensors.info(name), tensors.info(scale)
        self.shape = info.shape
        self.parts: tuple[str, ...] = (name, scale)
        self._rows, self._columns = self._block(of_scale.shape, block)
        self.stored: Format | mx.Dtype = mx.float32
        group = gcd(self._columns, self.shape[-1])
        if info.dtype == "F8_E4M3" and group % 32 == 0:
            if powers or of_scale.dtype == "F8_E8M0":
                self.stored = FIXED["mxfp8"]
            elif tensors.float8:
                self.stored = Format(8, group, FLOAT8)
        self.kind = f"{info.dtype}, {self._words()}"

    def read(self, first: int, last: int) -> Matrix:
        scales = self._scales()
        at = np.arange(self.shape[-2]) // self._rows
        if len(self.shape) == 2:
            at = at[first:last]
        else:
            scales = scales[first:last]
        scales = scales[..., at, :]
        if isinstance(self.stored, Format):
            return self._packed(scales, first, last, self.stored)
        columns = mx.array(np.arange(self.shape[-1]) // self._columns)
        return Dense(self._tensors.array(self._name, first, last).astype(mx.float32) * mx.array(scales)[..., columns])

    def _packed(self, scales: np.ndarray, first: int, last: int, form: Format) -> Matrix:
        codes = self._tensors.codes(self._name, first, last)
        if ((codes & 0x7F) == 0x7F).any():
            raise WeightsError(f"{self._name} holds NaN or infinite values")
        groups = np.arange(self.shape[-1] // form.group_size) * form.group_size // self._columns
        stored = scales if form.mode == FLOAT8 else self._powers(scales)
        return Quantized(mx.array(codes.view(np.uint32)), mx.array(stored[..., groups]), None, form)

    def _powers(self, scales: np.ndarray) -> np.ndarray:
        """Exponents of the scales, as mxfp8 stores them."""
        mantissas, exponents = np.frexp(scales)
        if not ((mantissas == 0.5) & (exponents > -127) & (exponents < 129)).all():
            raise CheckpointError(f"{self._tensors.path}: {self._scale} holds a scale that is no power of two, against the config")
        powers: np.ndarray = (exponents + 126).astype(np.uint8)
        return powers

    def _scales(self) -> np.ndarray:
        """Float32 scales `[..., rows of blocks, columns of blocks]`."""
        of_scale = self._tensors.info(self._scale)
        if of_scale.dtype == "F8_E8M0":
            found: np.ndarray = np.ldexp(np.float32(1), self._tensors.codes(self._scale).astype(np.int32) - 127)
        else:
            found = np.array(self._tensors.array(self._scale).astype(mx.float32))
        counts = -(-self.shape[-2] // self._rows), -(-self.shape[-1] // self._columns)
        if found.size == 1:
            return np.broadcast_to(found.reshape((1,) * len(self.shape)), (*self.shape[:-2], *counts))
        return found.reshape(*self.shape[:-2], *counts)

    def _block(self, stored: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        outer, (rows, columns) = self.shape[:-2], self.shape[-2:]
        if stored in ((), (1,), (*outer, 1, 1), (*outer, 1), outer):
            return rows, columns
        if stored in ((*outer, rows), (*outer, rows, 1)):
            return 1, columns
        if stored == (*outer, -(-rows // block[0]), -(-columns // block[1])):
            return block
        raise CheckpointError(f"{self._tensors.path}: {self._scale} has shape {list(stored)}, which does not fit {list(self.shape)}")

    def _words(self) -> str:
        if self._columns < self.shape[-1] or 1 < self._rows < self.shape[-2]:
            return f"a scale for {self._rows} x {self._columns}"
        return "a scale per row" if self._rows == 1 else "one scale"


def find(block: Block, tensors: StoredTensors) -> Found:
    """Return the matrices in 8-bit floats with a scale. Raises `CheckpointError` for a matrix without one."""
    asked = block.get("weight_block_size") or _BLOCK
    if not (isinstance(asked, (list, tuple)) and len(asked) == 2 and all(type(n) is int and n > 0 for n in asked)):
        raise CheckpointError(f"{tensors.path}: weight_block_size {asked!r} is no pair of sizes")
    found: Found = {}
    for name in tensors.names():
        info = tensors.info(name)
        if info.dtype in FLOATS and len(info.shape) >= 2 and not name.endswith(_SCALES):
            scale = next((name + ending for ending in _SCALES if name + ending in tensors), None)
            if scale is None:
                raise CheckpointError(f"{tensors.path}: {name} is stored as {info.dtype}, and there is no scale for it")
            found[name] = FP8Matrix(tensors, name, scale, (asked[0], asked[1]), block.get("scale_fmt") == "ue8m0")
    return found
