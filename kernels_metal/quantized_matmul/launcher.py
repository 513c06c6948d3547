"""Calls the product kernels: checks arrays, and chooses template arguments and thread counts."""

from __future__ import annotations

import mlx.core as mx

from ...errors import UnsupportedShapeError
from ..executors import get_kernel
from .block_formats import BLOCKS

ROWS = (1, 2, 4, 8, 16)
"""Rows of x for which there are variants; a product takes the smallest that holds its rows, or as many tiles of the largest as it needs."""
BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
FLOATS = (mx.float16, mx.bfloat16, mx.float32)

_FILE = "quantized_matmul/quantized_matmul.metal"
_COLUMNS, _PIECE, _PIECES = 16, 32, 8
"""Columns of a threadgroup's tile; numbers of a row that a lane takes at a time; pieces that a simdgroup takes at a time."""
_MANY_TILES = 512
"""Tiles from which on four simdgroups each keep a GPU busy; fewer tiles have up to eight."""
_MOST_SIMDGROUPS, _FEWER_SIMDGROUPS = 8, 4
_THREADS = 256
_PADDED = 8
"""Smaller arrays are passed in another address space."""


def rows_of_variant(rows: int) -> int:
    """Which of `ROWS` computes this many rows."""
    return next((most for most in ROWS if rows <= most), ROWS[-1])


def quantized_matmul(
    x: mx.array, weight: mx.array, scales: mx.array, biases: mx.array | None, *, bits: int, group_size: int, mode: str = "affine"
) -> mx.array:
    """x `[rows, K]` times MLX's quantized matrix `[N, K]`, transposed: `[rows, N]` in the dtype of x.

    `weight` is uint32 `[N, K * bits / 32]`; `scales` and `biases` are `[N, K / group_size]`: in the dtype of x for mode "affine", uint8 and
    None for "mxfp4". The matrix is read once per 16 rows; sums are float32. Raises ValueError for arrays that do not fit together, and
    `UnsupportedShapeError` for a format without a kernel.
    """
    rows, k = _shape(x)
    problem = why_unsupported(x.dtype, bits, group_size, mode, scales.dtype)
    if problem:
        raise UnsupportedShapeError(problem)
    n = weight.shape[0]
    expected = [(n, k * bits // 32), (n, k // group_size), *([(n, k // group_size)] if biases is not None else [])]
    arrays = [weight, scales, *([] if biases is None else [biases])]
    if [a.shape for a in arrays] != expected or k % group_size or weight.dtype != mx.uint32 or (biases is None) != (mode != "affine"):
        raise ValueError(f"a matrix of {[list(a.shape) for a in arrays]} does not multiply rows of {k}; expected {expected}")
    variant = rows_of_variant(rows)
    template: list[tuple[str, int | mx.Dtype]] = [("T", x.dtype), ("ROWS", variant)]
    if mode == "affine":
        template += [("BITS", bits), ("GROUP", group_size)]
    return _launch(f"{mode}_matmul", [x, weight, *map(_long_enough, arrays[1:])], template, rows, n, k)


def why_unsupported(dtype: mx.Dtype, bits: int, group_size: int, mode: str, scales: mx.Dtype) -> str | None:
    """Why there is no kernel for such products; None where there is one."""
    if dtype not in FLOATS:
        return f"no products of {dtype}; there are float32, float16 and bfloat16"
    if mode == "mxfp4":
        return None if (bits, group_size, scales) == (4, 32, mx.uint8) else f"no mxfp4 of {bits} bits in groups of {group_size}"
    if mode != "affine" or bits not in BITS or group_size not in GROUPS:
        return f"no products with {mode} codes of {bits} bits in groups of {group_size}; there are affine {BITS} in {GROUPS}, and mxfp4"
    return None if scales == dtype else f"no products of {dtype} with scales of {scales}, which MLX would compute in float32"


def block_matmul(x: mx.array, weight: mx.array, kind: str) -> mx.array:
    """x `[rows, K]` times a matrix `[N, K]` of GGUF blocks, transposed: `[rows, N]` in the dtype of x.

    `weight` is uint8 `[N, bytes of a row]`, as in the file; `kind` is a name in `BLOCKS`. The matrix is read once per 16 rows; its numbers
    are not rounded, sums are float32. Raises ValueError and `UnsupportedShapeError`.
    """
    rows, k = _shape(x)
    n, columns = _block_shape(weight, kind)
    if columns != k or x.dtype not in FLOATS:
        raise ValueError(f"rows of {k} numbers in {x.dtype} cannot be multiplied with rows of {columns}, in {kind}")
    template: list[tuple[str, int | mx.Dtype]] = [("T", x.dtype), ("ROWS", rows_of_variant(rows)), ("TYPE", BLOCKS[kind].id)]
    return _launch("block_matmul", [x, weight], template, rows, n, k)


def block_dequantize(weight: mx.array, kind: str, dtype: mx.Dtype) -> mx.array:
    """A matrix of GGUF blocks, uint8 `[N, bytes of a row]`, as numbers `[N, K]`, each rounded once. Raises ValueError and
    `UnsupportedShapeError`."""
    n, k = _block_shape(weight, kind)
    threads = -(-n * k // _PIECE // _THREADS) * _THREADS
    return get_kernel(_FILE, "block_dequantize")(
        inputs=[weight],
        template=[("T", dtype), ("TYPE", BLOCKS[kind].id)],
        output_shapes=[(n, k)],
        output_dtypes=[dtype],
        grid=(threads, 1, 1),
        threadgroup=(_THREADS, 1, 1),
    )[0]


def simdgroups_of(n: int, k: int) -> int:
    """How many simdgroups share the K of a tile: as few as finish at the same time, at most 8, or 4 where there are many tiles."""
    steps = -(-k // (_PIECE * _PIECES))
    most = _FEWER_SIMDGROUPS if -(-n // _COLUMNS) >= _MANY_TILES else _MOST_SIMDGROUPS
    rounds = -(-steps // most)
    return -(-steps // rounds)


def _launch(name: str, inputs: list[mx.array], template: list[tuple[str, int | mx.Dtype]], rows: int, n: int, k: int) -> mx.array:
    threads = 32 * simdgroups_of(n, k)
    return get_kernel(_FILE, name)(
        inputs=inputs,
        template=template,
        output_shapes=[(rows, n)],
        output_dtypes=[inputs[0].dtype],
        grid=(threads * -(-n // _COLUMNS), -(-rows // rows_of_variant(rows)), 1),
        threadgroup=(threads, 1, 1),
    )[0]


def _shape(x: mx.array) -> tuple[int, int]:
    if x.ndim != 2 or not x.size or x.shape[1] % _PIECE:
        raise ValueError(f"rows to multiply are {list(x.shape)}; expected [rows, K] with a K that {_PIECE} divides")
    return x.shape[0], x.shape[1]


def _block_shape(weight: mx.array, kind: str) -> tuple[int, int]:
    """N and K."""
    if kind not in BLOCKS:
        raise UnsupportedShapeError(f"no products with {kind}; there are {', '.join(BLOCKS)}")
    form = BLOCKS[kind]
    if weight.ndim != 2 or weight.dtype != mx.uint8 or not weight.size or weight.shape[1] % form.bytes:
        raise ValueError(f"a matrix of {kind} is {weight.dtype}{list(weight.shape)}; expected uint8 [N, a multiple of {form.bytes}]")
    return weight.shape[0], weight.shape[1] // form.bytes * form.numbers


def _long_enough(array: mx.array) -> mx.array:
    return array if array.size >= _PADDED else mx.pad(array.reshape(-1), (0, _PADDED - array.size))
