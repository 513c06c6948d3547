"""The bytes of one GGUF tensor to a `Matrix`: packed for MLX where MLX has the same format, float32 elsewhere.

Exactly MLX's: Q4_0, Q4_1 and Q8_0 (affine, groups of 32; scales and biases in float32, where both are exact), MXFP4 and NVFP4.
A ggml block of 32 four-bit codes keeps codes 0-15 in the low and 16-31 in the high nibbles of 16 bytes; MLX keeps neighbours together.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from ...errors import WeightsError
from ...nn.weights import Dense, Format, Matrix, Quantized
from .dequantize import dequantize
from .reader import TensorInfo

CHUNK_BYTES = 16 << 20
"""Dequantized float32 bytes at a time."""

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

_PACKED = {
    "Q4_0": Format(4, 32),
    "Q4_1": Format(4, 32),
    "Q8_0": Format(8, 32),
    "MXFP4": Format(4, 32, "mxfp4"),
    "NVFP4": Format(4, 16, "nvfp4"),
}
_NAN_SCALE = 255


def stored(info: TensorInfo) -> Format | mx.Dtype:
    """The format or dtype of what `decode` gives."""
    if info.type.name in _PACKED and len(info.shape) >= 2:
        return _PACKED[info.type.name]
    return _PLAIN[info.type.name][1] if info.type.name in _PLAIN else mx.float32


def decode(info: TensorInfo, data: np.ndarray) -> Matrix:
    """`data` is the tensor's bytes, uint8 `[nbytes]`. The result owns its memory and is evaluated.

    Raises `WeightsError` for an MXFP4 or NVFP4 matrix with a scale that is no number.
    """
    form = stored(info)
    if isinstance(form, Format):
        rows = data.reshape(*info.shape[:-1], info.shape[-1] // info.type.block, info.type.block_bytes)
        matrix = Quantized(*_PACKERS[info.type.name](rows, info.name), form)
        mx.eval(matrix.weight, matrix.scales)
        return matrix
    if info.type.name not in _PLAIN:
        return Dense(_dequantized(info, data))
    source, dtype = _PLAIN[info.type.name]
    values = mx.array(data.view(source).reshape(info.shape))
    values = values.view(dtype) if info.type.name == "BF16" else values.astype(dtype)
    mx.eval(values)
    return Dense(values)


def _dequantized(info: TensorInfo, data: np.ndarray) -> mx.array:
    """Float32, written chunk by chunk into the result's own memory: the peak is the result and one chunk."""
    result = mx.zeros(info.shape, mx.float32)
    mx.eval(result)
    target = np.array(result, copy=False).reshape(-1)
    blocks = data.reshape(-1, info.type.block_bytes)
    step = max(1, CHUNK_BYTES // (4 * info.type.block))
    for start in range(0, len(blocks), step):
        values = dequantize(info.type, blocks[start : start + step])
        target[start * info.type.block :][: values.size] = values.reshape(-1)
    return result


def _interleave(codes: np.ndarray) -> np.ndarray:
    """Bytes `[..., n]` with codes 0..n-1 low and n..2n-1 high, to bytes whose nibbles are neighbours, low first."""
    half = codes.shape[-1] // 2
    low, high = codes & 0x0F, codes >> 4
    packed = np.empty_like(codes)
    packed[..., :half] = low[..., 0::2] | low[..., 1::2] << 4
    packed[..., half:] = high[..., 0::2] | high[..., 1::2] << 4
    return packed


def _words(packed: np.ndarray) -> mx.array:
    """Bytes `[..., blocks, n]` to uint32 `[..., blocks * n / 4]`."""
    flat = np.ascontiguousarray(packed).reshape(*packed.shape[:-2], packed.shape[-2] * packed.shape[-1])
    return mx.array(flat.view("<u4"))


def _halves(rows: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of every block, as float32 `[..., blocks]`."""
    return np.ascontiguousarray(rows[..., at : at + 2]).view("<f2")[..., 0].astype(np.float32)


Packed = tuple[mx.array, mx.array, "mx.array | None"]


def _q4_0(rows: np.ndarray, name: str) -> Packed:
    scales = _halves(rows, 0)
    return _words(_interleave(rows[..., 2:])), mx.array(scales), mx.array(scales * -8)


def _q4_1(rows: np.ndarray, name: str) -> Packed:
    return _words(_interleave(rows[..., 4:])), mx.array(_halves(rows, 0)), mx.array(_halves(rows, 2))


def _q8_0(rows: np.ndarray, name: str) -> Packed:
    scales = _halves(rows, 0)
    return _words(rows[..., 2:] ^ 0x80), mx.array(scales), mx.array(scales * -128)


def _mxfp4(rows: np.ndarray, name: str) -> Packed:
    scales = np.ascontiguousarray(rows[..., 0])
    return _words(_interleave(rows[..., 1:])), mx.array(_numbers(scales, name)), None


def _nvfp4(rows: np.ndarray, name: str) -> Packed:
    """Blocks of 64 hold four groups of 16. ggml's scales have no sign bit, and 127 means zero there."""
    scales = _numbers(np.ascontiguousarray(rows[..., :4]), name) & 0x7F
    groups = rows[..., 4:].reshape(*rows.shape[:-2], rows.shape[-2] * 4, 8)
    return _words(_interleave(groups)), mx.array(np.where(scales == 0x7F, 0, scales).astype(np.uint8).reshape(groups.shape[:-1])), None


def _numbers(scales: np.ndarray, name: str) -> np.ndarray:
    if (scales == _NAN_SCALE).any():
        raise WeightsError(f"tensor {name} has a scale that is not a number; the file is damaged, download or convert it again")
    return scales


_PACKERS: dict[str, Callable[[np.ndarray, str], Packed]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}
