"""Numbers of GGUF blocks, products with them, and gates of products, in plain MLX."""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx

from .block_formats import BLOCKS


def columns_of_bytes(kind: str, count: int) -> int:
    """Return the count of numbers in a row of this many bytes."""
    form = BLOCKS[kind]
    return count // form.bytes * form.numbers


def block_matmul(x: mx.array, weight: mx.array, kind: str) -> mx.array:
    """Multiply as the kernel does, through a matrix of numbers in the dtype of x."""
    return x @ dequantized(weight, kind, x.dtype).T


def gated(x: mx.array, up: mx.array, gate: str) -> mx.array:
    """Return `gate(x) * up` for a `gate` of the launcher's `GATES`."""
    if gate == "silu":
        return x * mx.sigmoid(x) * up
    return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))) * up


def dequantized(weight: mx.array, kind: str, dtype: mx.Dtype) -> mx.array:
    """Convert uint8 `[..., bytes of a row]` to numbers `[..., K]`, computed in float32 in ggml's order and rounded once."""
    form = BLOCKS[kind]
    blocks = weight.reshape(*weight.shape[:-1], -1, form.bytes)
    numbers: mx.array = _DECODERS[kind](blocks).astype(dtype)
    return numbers.reshape(*weight.shape[:-1], blocks.shape[-2] * form.numbers)


def _q4_0(blocks: mx.array) -> mx.array:
    return _half(blocks, 0) * (_halves(blocks[..., 2:]) - 8)


def _q5_0(blocks: mx.array) -> mx.array:
    return _half(blocks, 0) * (_halves(blocks[..., 6:]) + 16 * _fields(blocks[..., 2:6], 1) - 16)


def _q8_0(blocks: mx.array) -> mx.array:
    return _half(blocks, 0) * _signed(blocks[..., 2:])


def _q4_k(blocks: mx.array) -> mx.array:
    scales, minima = _paired_scales(blocks)
    codes = _halves(blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32)).reshape(*blocks.shape[:-1], 8, 32)
    return scales * codes - minima


def _q5_k(blocks: mx.array) -> mx.array:
    scales, minima = _paired_scales(blocks)
    codes = _halves(blocks[..., 48:].reshape(*blocks.shape[:-1], 4, 32)).reshape(*blocks.shape[:-1], 8, 32)
    fifths = _fields(blocks[..., 16:48, None], 1).swapaxes(-1, -2)  # [..., 8 groups, 32]
    return scales * (codes + 16 * fifths) - minima


def _q6_k(blocks: mx.array) -> mx.array:
    outer = blocks.shape[:-1]
    lows = blocks[..., :128].reshape(*outer, 2, 64)
    low = mx.concatenate([lows & 15, lows >> 4], axis=-1).reshape(*outer, 2, 4, 32)
    high = _fields(blocks[..., 128:192].reshape(*outer, 2, 32, 1), 2).swapaxes(-1, -2)  # [..., 2 sides, 4, 32]
    codes = (low.astype(mx.float32) + 16 * high - 32).reshape(*outer, 16, 16)
    return (_half(blocks, 208)[..., None] * _signed(blocks[..., 192:208])[..., None]) * codes


def _paired_scales(blocks: mx.array) -> tuple[mx.array, mx.array]:
    """Return scales and minima of the eight groups of Q4_K and Q5_K, each `[..., 8, 1]`."""
    a, b, c = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = mx.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], axis=-1).astype(mx.float32)
    minima = mx.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], axis=-1).astype(mx.float32)
    return (_half(blocks, 0) * scales)[..., None], (_half(blocks, 2) * minima)[..., None]


def _half(blocks: mx.array, at: int) -> mx.array:
    """Return the float16 at byte `at` of every block, `[..., 1]` float32."""
    return mx.contiguous(blocks[..., at : at + 2]).view(mx.float16).astype(mx.float32)


def _halves(codes: mx.array) -> mx.array:
    """Return the low halves of bytes `[..., n]`, then their high halves, `[..., 2 n]` float32."""
    return mx.concatenate([codes & 15, codes >> 4], axis=-1).astype(mx.float32)


def _fields(codes: mx.array, bits: int) -> mx.array:
    """Return the fields of bytes `[..., n]`, lowest first, `[..., n * 8 / bits]` float32."""
    shifts = mx.arange(0, 8, bits, dtype=mx.uint8)
    fields = (codes[..., None] >> shifts) & ((1 << bits) - 1)
    return fields.reshape(*codes.shape[:-1], -1).astype(mx.float32)


def _signed(codes: mx.array) -> mx.array:
    return mx.contiguous(codes).view(mx.int8).astype(mx.float32)


_DECODERS: dict[str, Callable[[mx.array], mx.array]] = {
    "Q4_0": _q4_0,
    "Q5_0": _q5_0,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
"""Functions from uint8 `[..., blocks, bytes]` to float32 numbers of each block, in any shape with their order."""
