"""MLX's format for each block type of GGUF, and its loss.

MLX multiplies affine groups of 32, 64 or 128 numbers: `scale * code + bias`. Types with groups of 32 keep their codes. If scale and bias
are products of two numbers of the file, float16 rounds them (`loss`). MLX has no format for groups of 16: two of them share a finer
scale, see `kquants.share`.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from ...nn.weights import Format
from ...util.dataclass import dataclass
from . import kquants
from .bitstream import halves, interleave, nibbles, squeeze, words
from .kquants import share

Packed = tuple[np.ndarray, ...]
"""`weight` uint32 `[rows, in * bits / 32]`, `scales` `[rows, in / group]`, and for affine formats `biases` of the same shape."""

_NAN_SCALE = 255
_ZERO_SCALE = 127


@dataclass(frozen=True, slots=True)
class Packing:
    """Form of a block type in a format of MLX."""

    format: Format
    pack: Callable[[np.ndarray], Packed]
    """Packs uint8 blocks `[rows, blocks, block_bytes]`. Raises `ValueError` for a scale that is NaN."""
    loss: float = 0.0
    """KL divergence per token from the file's own numbers, in nats, with float16 scales: the higher value of
    `benchmarks/results/kernels/gguf_gpu.md`. 0 if no number changes."""


def _q4_0(blocks: np.ndarray) -> Packed:
    scales = halves(blocks, 0)
    return words(interleave(blocks[..., 2:])), scales, scales * -8


def _q4_1(blocks: np.ndarray) -> Packed:
    return words(interleave(blocks[..., 4:])), halves(blocks, 0), halves(blocks, 2)


def _q8_0(blocks: np.ndarray) -> Packed:
    scales = halves(blocks, 0)
    return words(blocks[..., 2:] ^ 0x80), scales, scales * -128


def _q5_0(blocks: np.ndarray) -> Packed:
    scales = halves(blocks, 0)
    return _codes_of_5_bits(blocks, 2), scales, scales * -16


def _q5_1(blocks: np.ndarray) -> Packed:
    return _codes_of_5_bits(blocks, 4), halves(blocks, 0), halves(blocks, 2)


def _codes_of_5_bits(blocks: np.ndarray, at: int) -> np.ndarray:
    """Codes of 32 numbers: their highest bits in four bytes at `at`, then the other bits."""
    fifth = np.unpackbits(blocks[..., at : at + 4], axis=-1, bitorder="little")
    return words(squeeze(nibbles(blocks[..., at + 4 :]) | fifth << 4, 5))


def _q4_k(blocks: np.ndarray) -> Packed:
    scales, minima = kquants.of_32(blocks)
    codes = interleave(blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32))
    return words(codes), scales, minima


def _q5_k(blocks: np.ndarray) -> Packed:
    groups = kquants.q5_k(blocks)
    return words(squeeze(groups.codes, 5)), groups.scales, groups.offsets


def _with_shared_scales(unpack: Callable[[np.ndarray], kquants.Groups], bits: int) -> Callable[[np.ndarray], Packed]:
    def pack(blocks: np.ndarray) -> Packed:
        groups = share(unpack(blocks), bits)
        return words(squeeze(groups.codes, bits)), groups.scales, groups.offsets

    return pack


_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int16)
"""Values of the codes of IQ4_NL and IQ4_XS."""


def _iq4_nl(blocks: np.ndarray) -> Packed:
    return _pack_levels(blocks[..., 2:], halves(blocks, 0))


def _iq4_xs(blocks: np.ndarray) -> Packed:
    """IQ4_XS: a scale, the high bits of eight other scales in 16 bits, their low bits in four bytes, and codes."""
    high = np.ascontiguousarray(blocks[..., 2:4]).view("<u2")
    low = blocks[..., 4:8]
    steps = np.stack([low & 0x0F, low >> 4], axis=-1).reshape(*low.shape[:-1], 8).astype(np.int8)
    steps |= ((high >> np.arange(0, 16, 2, dtype=np.uint16)) & 3).astype(np.int8) << 4
    # Rounded here, because the bias must match the stored scale.
    scales = (halves(blocks, 0)[..., None] * (steps - 32)).astype(np.float16).astype(np.float32)
    return _pack_levels(blocks[..., 8:].reshape(*blocks.shape[:-1], 8, 16), scales)


def _pack_levels(codes: np.ndarray, scales: np.ndarray) -> Packed:
    """128 is a power of two, so the bias needs as few digits as the scale."""
    numbers = (_LEVELS + 128).astype(np.uint8)[nibbles(codes)]
    flat = scales.reshape(len(scales), -1)
    return words(numbers), flat, flat * -128


def _mxfp4(blocks: np.ndarray) -> Packed:
    return words(interleave(blocks[..., 1:])), _without_nan(blocks[..., 0])


def _mxfp4_ollama(blocks: np.ndarray) -> Packed:
    return words(np.ascontiguousarray(blocks[..., 1:])), _without_nan(blocks[..., 0])


def _nvfp4(blocks: np.ndarray) -> Packed:
    """NVFP4: blocks of 64 have four groups of 16. ggml's scales have no sign bit, and 127 means zero there."""
    scales = _without_nan(blocks[..., :4]) & 0x7F
    scales[scales == _ZERO_SCALE] = 0
    groups = blocks[..., 4:].reshape(len(blocks), -1, 8)
    return words(interleave(groups)), scales.reshape(groups.shape[:-1])


def _without_nan(scales: np.ndarray) -> np.ndarray:
    if (scales == _NAN_SCALE).any():
        raise ValueError("a scale is not a number")
    return scales


ALIKE: dict[str, Packing] = {
    "Q4_0": Packing(Format(4, 32), _q4_0),
    "Q4_1": Packing(Format(4, 32), _q4_1),
    "Q8_0": Packing(Format(8, 32), _q8_0),
    "MXFP4": Packing(Format(4, 32, "mxfp4"), _mxfp4),
    "MXFP4_OLLAMA": Packing(Format(4, 32, "mxfp4"), _mxfp4_ollama),
    "NVFP4": Packing(Format(4, 16, "nvfp4"), _nvfp4),
}
"""Types that MLX has too: always packed."""

PACKINGS: dict[str, Packing] = {
    **ALIKE,
    "Q5_0": Packing(Format(5, 32), _q5_0),
    "Q5_1": Packing(Format(5, 32), _q5_1),
    "IQ4_NL": Packing(Format(8, 32), _iq4_nl),
    "IQ4_XS": Packing(Format(8, 32), _iq4_xs, 2.5e-6),
    "Q4_K": Packing(Format(4, 32), _q4_k, 3.3e-5),
    "Q5_K": Packing(Format(5, 32), _q5_k, 2.7e-5),
    "Q6_K": Packing(Format(8, 32), _with_shared_scales(kquants.q6_k, 8), 5.7e-4),
    "Q3_K": Packing(Format(6, 32), _with_shared_scales(kquants.q3_k, 6), 6.2e-3),
    "Q2_K": Packing(Format(6, 32), _with_shared_scales(kquants.q2_k, 6), 3e-1),
}
"""Types that are packed for a GPU. Others are unpacked to 16 bits."""

SAME_BITS = frozenset(kind for kind in PACKINGS if kind.startswith(("Q4", "Q5", "Q8")))
"""Types whose codes keep their bits when packed."""

SHARED = frozenset({"Q6_K", "Q3_K", "Q2_K"})
"""Types of groups of 16, two of which share a scale when packed."""


def lossy(dtype: mx.Dtype) -> frozenset[str]:
    """Types that lose precision when they are packed for a model that computes in this dtype."""
    rounded = {kind for kind, packing in PACKINGS.items() if packing.loss}
    return frozenset(rounded - _PRODUCTS if dtype == mx.float32 else rounded)


_PRODUCTS = frozenset({"Q4_K", "Q5_K"})
"""Only float16 rounds their scales."""
