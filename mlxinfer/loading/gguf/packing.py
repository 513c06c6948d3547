"""Blocks of the ggml formats that MLX has as well, to MLX's packed form, in numpy.

Q4_0, Q4_1 and Q8_0 are affine in groups of 32; scales and biases come in float32, where both are exact. A ggml block of 32 four-bit
codes keeps codes 0-15 in the low and 16-31 in the high nibbles of 16 bytes; MLX keeps neighbours together, low nibble first.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...nn.weights import Format

_NAN_SCALE = 255
_ZERO_SCALE = 127

Packed = tuple[np.ndarray, ...]
"""`weight` uint32 `[rows, in * bits / 32]`, `scales` `[rows, in / group]`, and for the affine formats `biases` of the same shape."""


def _q4_0(blocks: np.ndarray) -> Packed:
    scales = _halves(blocks, 0)
    return _words(_interleave(blocks[..., 2:])), scales, scales * -8


def _q4_1(blocks: np.ndarray) -> Packed:
    return _words(_interleave(blocks[..., 4:])), _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: np.ndarray) -> Packed:
    scales = _halves(blocks, 0)
    return _words(blocks[..., 2:] ^ 0x80), scales, scales * -128


def _mxfp4(blocks: np.ndarray) -> Packed:
    return _words(_interleave(blocks[..., 1:])), _numbers(blocks[..., 0])


def _nvfp4(blocks: np.ndarray) -> Packed:
    """Blocks of 64 hold four groups of 16. ggml's scales have no sign bit, and 127 means zero there."""
    scales = _numbers(blocks[..., :4]) & 0x7F
    scales[scales == _ZERO_SCALE] = 0
    groups = blocks[..., 4:].reshape(len(blocks), -1, 8)
    return _words(_interleave(groups)), scales.reshape(groups.shape[:-1])


FORMATS: dict[str, tuple[Format, Callable[[np.ndarray], Packed]]] = {
    "Q4_0": (Format(4, 32), _q4_0),
    "Q4_1": (Format(4, 32), _q4_1),
    "Q8_0": (Format(8, 32), _q8_0),
    "MXFP4": (Format(4, 32, "mxfp4"), _mxfp4),
    "NVFP4": (Format(4, 16, "nvfp4"), _nvfp4),
}
"""MLX's format, and what packs uint8 blocks `[rows, blocks, block_bytes]`. Raises ValueError for a scale that is no number."""


def _interleave(codes: np.ndarray) -> np.ndarray:
    """Bytes `[..., n]` with codes 0..n-1 low and n..2n-1 high, to bytes whose nibbles are neighbours."""
    half = codes.shape[-1] // 2
    low, high = codes & 0x0F, codes >> 4
    packed = np.empty_like(codes)
    packed[..., :half] = low[..., 0::2] | low[..., 1::2] << 4
    packed[..., half:] = high[..., 0::2] | high[..., 1::2] << 4
    return packed


def _words(packed: np.ndarray) -> np.ndarray:
    """Bytes `[rows, blocks, n]` to uint32 `[rows, blocks * n / 4]`."""
    return np.ascontiguousarray(packed).reshape(len(packed), -1).view("<u4")


def _halves(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of every block, as float32 `[rows, blocks]`."""
    halves = np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")
    return np.asarray(halves[..., 0], np.float32)


def _numbers(scales: np.ndarray) -> np.ndarray:
    if (scales == _NAN_SCALE).any():
        raise ValueError("a scale is not a number")
    return scales
