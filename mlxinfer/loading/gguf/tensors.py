"""Converts the bytes of one GGUF tensor to a `Matrix`: packed in a format of MLX, or as numbers."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import mlx.core as mx
import numpy as np

from ...errors import UnsupportedModelError, WeightsError
from ...nn.weights import Dense, Format, Matrix, Quantized
from .bitstream import squeeze, words
from .mlx_formats import ALIKE, PACKINGS, SHARED, Packed
from .reader import TensorInfo
from .types import TensorType


def dequantize(kind: TensorType, blocks: np.ndarray) -> np.ndarray:
    """Dequantize blocks, uint8 `[n, block_bytes]`, to float32 `[n, block]`. Raises `UnsupportedModelError` for a type without a decoder."""
    decode = _OWN.get(kind.name) or _of_gguf(kind)
    with np.errstate(over="ignore", invalid="ignore"):
        return decode(blocks)


def _of_gguf(kind: TensorType) -> Callable[[np.ndarray], np.ndarray]:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize as gguf_dequantize

    def decode(blocks: np.ndarray) -> np.ndarray:
        row = blocks.reshape(1, -1)  # the package processes 16 rows at a time: one long row is much faster
        try:
            return np.asarray(gguf_dequantize(row, GGMLQuantizationType(kind.id)), np.float32).reshape(len(blocks), -1)
        except NotImplementedError:
            raise UnsupportedModelError(
                f"GGUF tensors of type {kind.name} cannot be decoded; use another quantization of the model"
            ) from None

    return decode


def _leading_halves(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)


def _singles(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, :4]).view("<f4").astype(np.float32)


def _codes(packed: np.ndarray, bits: int) -> np.ndarray:
    """Codes packed from the low bits of each byte up, as float32."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (packed[:, :, None] >> shifts) & ((1 << bits) - 1)
    return codes.reshape(len(packed), -1).astype(np.float32)


def _q1_0(blocks: np.ndarray) -> np.ndarray:
    return np.asarray(_leading_halves(blocks) * (2 * _codes(blocks[:, 2:], 1) - 1))


def _q2_0(blocks: np.ndarray) -> np.ndarray:
    return np.asarray(_leading_halves(blocks) * (_codes(blocks[:, 2:], 2) - 1))


def _q8_1(blocks: np.ndarray) -> np.ndarray:
    """Q8_1: a scale, a sum that only ggml's dot products use, 32 codes. The first two are float16, in old files float32."""
    wide = blocks.shape[1] == 40
    scales = _singles(blocks) if wide else _leading_halves(blocks)
    return np.asarray(scales * np.ascontiguousarray(blocks[:, -32:]).view(np.int8).astype(np.float32))


def _q8_k(blocks: np.ndarray) -> np.ndarray:
    return np.asarray(_singles(blocks) * np.ascontiguousarray(blocks[:, 4:260]).view(np.int8).astype(np.float32))


_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _mxfp4_ollama(blocks: np.ndarray) -> np.ndarray:
    """MXFP4 of Ollama's first files: a power of two, and 32 float codes in order."""
    return np.asarray(np.ldexp(_FP4[_codes(blocks[:, 1:], 4).astype(np.uint8)], blocks[:, :1].astype(np.int32) - 127))


_OWN: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "MXFP4_OLLAMA": _mxfp4_ollama,
    "Q1_0": _q1_0,
    "Q2_0": _q2_0,
    "Q8_1": _q8_1,
    "Q8_K": _q8_k,
}


CHUNK_BYTES = 16 << 20
"""Bytes of float32 numbers that are decoded at a time."""
_PACKERS = min(os.cpu_count() or 1, 8)
"""Threads that decode a piece of blocks together: NumPy releases the interpreter while it computes."""

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
"""Types that stay as they are. Apple's GPUs do not compute float64, which is rounded to float32."""


def stored(info: TensorInfo) -> Format | mx.Dtype:
    """Format or dtype of the tensor once read."""
    if info.kept or info.packed:
        return info.kept or PACKINGS[info.type.name].format
    if info.type.name in ALIKE and len(info.shape) >= 2:
        return ALIKE[info.type.name].format
    return _PLAIN[info.type.name][1] if info.type.name in _PLAIN else mx.float32


def rows_at_a_time(info: TensorInfo) -> int:
    """Rows of a tensor per piece of `decode`."""
    return max(1, CHUNK_BYTES // (4 * math.prod(info.shape[-1:])))


def decode(info: TensorInfo, pieces: Iterable[np.ndarray]) -> Matrix:
    """Decode `pieces`, the tensor's bytes, uint8 `[some rows, bytes of a row]`, in order.

    Pieces are written into the result's own memory, so the peak is the result and one piece. Raises `WeightsError` for an MXFP4 or NVFP4
    matrix with a scale that is NaN.
    """
    form = stored(info)
    if isinstance(form, Format):
        return _pack_pieces(info, form, pieces)
    if form == mx.bfloat16:
        return Dense(_fill_pieces(info.shape, mx.uint16, (piece.view("<u2") for piece in pieces)).view(form))
    return Dense(_fill_pieces(info.shape, form, map(_dequantizer(info), pieces)))


def _pack_pieces(info: TensorInfo, form: Format, pieces: Iterable[np.ndarray]) -> Quantized:
    *outer, columns = info.shape
    narrow = mx.float32 if form.mode == "affine" else mx.uint8
    shapes = [(*outer, columns * form.bits // 32), *[(*outer, columns // form.group_size)] * (2 if form.mode == "affine" else 1)]
    arrays = [_empty(shape, dtype) for shape, dtype in zip(shapes, (mx.uint32, narrow, narrow), strict=False)]
    targets = [_rows_of(array) for array in arrays]
    pack, row = PACKINGS[info.type.name].pack, 0

    def place(piece: np.ndarray, row: int) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            parts: Packed = pack(piece.reshape(len(piece), -1, info.type.block_bytes))
        for target, part in zip(targets, parts, strict=True):
            target[row : row + len(piece)] = part

    alone = info.type.name in SHARED  # MLX would keep a stream for every thread
    with ThreadPoolExecutor(_PACKERS) as pool:
        each: Callable[..., Iterator[None]] = map if alone else pool.map
        for piece in pieces:
            step = len(piece) if alone else -(-len(piece) // _PACKERS)
            starts = range(0, len(piece), step)
            try:
                list(each(place, [piece[at : at + step] for at in starts], [row + at for at in starts]))
            except ValueError as error:
                raise WeightsError(f"tensor {info.name}: {error}; the file is damaged, download or convert it again") from None
            row += len(piece)
    return Quantized(arrays[0], arrays[1], arrays[2] if len(arrays) > 2 else None, form)


def widened(matrix: Quantized, bits: int) -> Quantized:
    """The same numbers with codes of more bits."""
    form = matrix.format
    ones = mx.ones(matrix.scales.shape)
    codes = mx.dequantize(matrix.weight, ones, mx.zeros_like(ones), form.group_size, form.bits).astype(mx.uint8)
    packed = words(squeeze(np.array(codes).reshape(-1, 1, codes.shape[-1]), bits))
    weight = mx.array(packed).reshape(*codes.shape[:-1], -1)
    return replace(matrix, weight=weight, format=replace(form, bits=bits))


def _dequantizer(info: TensorInfo) -> Callable[[np.ndarray], np.ndarray]:
    if info.type.name in _PLAIN:
        return lambda piece: piece.view(_PLAIN[info.type.name][0])
    return lambda piece: dequantize(info.type, piece.reshape(-1, info.type.block_bytes)).reshape(len(piece), -1)


def _fill_pieces(shape: tuple[int, ...], dtype: mx.Dtype, pieces: Iterable[np.ndarray]) -> mx.array:
    array = _empty(shape, dtype)
    target = _rows_of(array)
    row = 0
    for piece in pieces:
        with np.errstate(over="ignore", invalid="ignore"):  # float64 to float32
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
