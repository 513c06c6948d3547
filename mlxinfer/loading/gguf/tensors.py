"""The bytes of one GGUF tensor to a `Matrix`: packed where MLX has the same format, in float32 where it has none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import mlx.core as mx
import numpy as np

from ...errors import WeightsError
from ...nn.weights import Dense, Format, Matrix, Quantized
from .dequantize import dequantize
from .packing import FORMATS
from .reader import TensorInfo

CHUNK_BYTES = 16 << 20
"""Bytes of float32 numbers that are decoded at a time."""

_PLAIN: dict[str, tuple[str, mx.Dtype]] = {
    "F32": ("<f4", mx.float32),
    "F16": ("<f2", mx.float16),
    "BF16": ("<u2", mx.bfloat16),
    "F64": ("<f8", mx.float32),
    "I8": ("<i1", mx.int8),
    "I16": ("<i2", mx.int16),
    "I32": ("<i4", mx.int32),
    "I64": ("<i8", mx.int64),
}
"""Types that are kept as they are; float64, which no GPU of Apple's computes, is rounded to float32."""


def stored(info: TensorInfo) -> Format | mx.Dtype:
    """The format or dtype of what is read."""
    if info.kept:
        return info.kept
    if info.type.name in FORMATS and len(info.shape) >= 2:
        return FORMATS[info.type.name][0]
    return _PLAIN[info.type.name][1] if info.type.name in _PLAIN else mx.float32


def rows_at_a_time(info: TensorInfo) -> int:
    """How many rows of a tensor to give `decode` at once."""
    return max(1, CHUNK_BYTES // (4 * math.prod(info.shape[-1:])))


def decode(info: TensorInfo, pieces: Iterable[np.ndarray]) -> Matrix:
    """`pieces` are the tensor's bytes, uint8 `[some rows, bytes of a row]`, in order.

    The result is written piece by piece into memory of its own, so the peak is the result and one piece. Raises `WeightsError` for
    an MXFP4 or NVFP4 matrix with a scale that is no number.
    """
    form = stored(info)
    if isinstance(form, Format):
        return _packed(info, form, pieces)
    if form == mx.bfloat16:
        return Dense(_filled(info.shape, mx.uint16, (piece.view("<u2") for piece in pieces)).view(form))
    return Dense(_filled(info.shape, form, map(_numbers_of(info), pieces)))


def _packed(info: TensorInfo, form: Format, pieces: Iterable[np.ndarray]) -> Quantized:
    *outer, columns = info.shape
    narrow = mx.float32 if form.mode == "affine" else mx.uint8
    shapes = [(*outer, columns * form.bits // 32), *[(*outer, columns // form.group_size)] * (2 if form.mode == "affine" else 1)]
    arrays = [_empty(shape, dtype) for shape, dtype in zip(shapes, (mx.uint32, narrow, narrow), strict=False)]
    targets = [_rows_of(array) for array in arrays]
    pack = FORMATS[info.type.name][1]
    row = 0
    for piece in pieces:
        try:
            parts = pack(piece.reshape(len(piece), -1, info.type.block_bytes))
        except ValueError as error:
            raise WeightsError(f"tensor {info.name}: {error}; the file is damaged, download or convert it again") from None
        for target, part in zip(targets, parts, strict=True):
            target[row : row + len(piece)] = part
        row += len(piece)
    return Quantized(arrays[0], arrays[1], arrays[2] if len(arrays) > 2 else None, form)


def _numbers_of(info: TensorInfo) -> Callable[[np.ndarray], np.ndarray]:
    if info.type.name in _PLAIN:
        return lambda piece: piece.view(_PLAIN[info.type.name][0])
    return lambda piece: dequantize(info.type, piece.reshape(-1, info.type.block_bytes)).reshape(len(piece), -1)


def _filled(shape: tuple[int, ...], dtype: mx.Dtype, pieces: Iterable[np.ndarray]) -> mx.array:
    array = _empty(shape, dtype)
    target = _rows_of(array)
    row = 0
    for piece in pieces:
        target[row : row + len(piece)] = piece
        row += len(piece)
    return array


def _empty(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    array = mx.zeros(shape, dtype)
    mx.eval(array)
    return array


def _rows_of(array: mx.array) -> np.ndarray:
    """The array's own memory, `[rows, columns]`."""
    return np.array(array, copy=False).reshape(-1, math.prod(array.shape[-1:]))
