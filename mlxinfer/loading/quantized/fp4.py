"""4-bit floats with scales: NVFP4, in groups of 16 with an 8-bit scale and one scale for the matrix, and MXFP4, in groups of 32.

Bytes have two codes, the first in the low half, as in MLX. MLX's nvfp4 has no scale for the whole matrix. If that is a power of two
which fits in the 8-bit scales, they absorb it exactly; otherwise the matrix is unpacked. modelopt multiplies with the matrix's scale
(`weight_scale_2`), compressed-tensors divides by it (`weight_global_scale`).
"""

from __future__ import annotations

from functools import cached_property

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError
from ...nn.weights import Dense, Format, Matrix, Quantized
from ..formats import FIXED
from .stored import StoredTensors

_EIGHT_BITS = {"U8", "F8_E8M0", "F8_E4M3"}


class NVFP4Matrix:
    """Implements `PackedMatrix`."""

    kind = "NVFP4"

    def __init__(self, tensors: StoredTensors, weight: str, scale: str, whole: str, *, divides: bool) -> None:
        self._tensors, self._divides = tensors, divides
        self.parts: tuple[str, ...] = (weight, scale, whole)
        self.shape = _shape(tensors, weight, scale, 16)
        if tensors.info(whole).nbytes != 4:
            tensors.check(whole, ())

    @cached_property
    def stored(self) -> Format | mx.Dtype:
        return mx.float32 if self._folded is None else FIXED["nvfp4"]

    def read(self, first: int, last: int) -> Matrix:
        codes = mx.array(self._tensors.codes(self.parts[0], first, last).view(np.uint32))
        if self._folded is not None:
            return Quantized(codes, mx.array(self._folded[first:last]), None, FIXED["nvfp4"])
        ones = mx.full((*codes.shape[:-1], codes.shape[-1] // 2), 0x38, mx.uint8)
        plain = mx.dequantize(codes, ones, None, 16, 4, "nvfp4").astype(mx.float32)
        scales = self._tensors.array(self.parts[1], first, last).astype(mx.float32)
        scales = scales / self._whole if self._divides else scales * self._whole
        return Dense(plain * mx.repeat(scales, 16, axis=-1))

    @property
    def _whole(self) -> mx.array:
        return self._tensors.array(self.parts[2]).astype(mx.float32).reshape(())

    @cached_property
    def _folded(self) -> np.ndarray | None:
        """Codes of scales that include the matrix's scale, or None if it does not fit."""
        mantissa, exponent = np.frexp(np.float32(float(self._whole.item())))  # type: ignore[arg-type]
        if mantissa != 0.5:
            return None
        exponent = 1 - int(exponent) if self._divides else int(exponent) - 1
        if exponent == 0:
            return self._tensors.codes(self.parts[1])
        wanted = self._tensors.array(self.parts[1]).astype(mx.float32) * 2.0**exponent
        codes = mx.to_fp8(wanted)
        return np.array(codes) if mx.array_equal(mx.from_fp8(codes, mx.float32), wanted).item() else None


class MXFP4Matrix:
    """Implements `PackedMatrix`."""

    kind = "MXFP4"
    stored = FIXED["mxfp4"]

    def __init__(self, tensors: StoredTensors, weight: str, scale: str) -> None:
        self._tensors = tensors
        self.parts: tuple[str, ...] = (weight, scale)
        self.shape = _shape(tensors, weight, scale, 32)

    def read(self, first: int, last: int) -> Matrix:
        codes, scales = (self._tensors.codes(part, first, last) for part in self.parts)
        return Quantized(mx.array(codes.view(np.uint32)), mx.array(scales), None, FIXED["mxfp4"])


def _shape(tensors: StoredTensors, weight: str, scale: str, group: int) -> tuple[int, ...]:
    """Shape of the unpacked matrix. Raises `CheckpointError` if the scales do not fit."""
    shape = tensors.info(weight).shape
    columns = shape[-1] * 2
    if columns % 32 or tensors.info(scale).dtype not in _EIGHT_BITS:
        raise CheckpointError(f"{tensors.path}: {weight} and its scales do not make up a matrix of 4-bit floats in groups of {group}")
    tensors.check(scale, (*shape[:-1], columns // group))
    return (*shape[:-1], columns)
