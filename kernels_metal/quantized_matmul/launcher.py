"""Launches the product kernels: checks arrays, and chooses template arguments and thread counts."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from ...errors import UnsupportedShapeError
from ..executors import Launch, gpu_cores
from .block_formats import BLOCKS

ROWS = (1, 2, 4, 8, 16)
"""Rows of x with a variant. A product uses the smallest one with enough rows, or several tiles of the largest. MLX's formats have a kernel
of their own for one row."""
GATED_ROWS = (1, 2, 4, 8)
"""Rows of gated products with a variant. More rows take two operations, as they would need a ninth variant."""
GATES = {"silu": 1, "gelu_tanh": 2}
"""Activations of gated products, by their names in `nn.activations`."""
BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
FLOATS = (mx.float16, mx.bfloat16, mx.float32)

_CODES_FILE, _BLOCKS_FILE = "quantized_matmul/quantized_matmul.metal", "quantized_matmul/block_matmul.metal"
_ROW_FILE = "quantized_matmul/one_row.metal"
_KNOWN_SHAPES = 4096
"""Number of cached launches: steps repeat a few products."""
_COLUMNS, _PIECE, _PIECES = 16, 32, 8
"""Columns of a threadgroup's tile; numbers of a row per load of a lane; such pieces per step of a simdgroup."""
_MANY_TILES = 512
"""Minimum tiles for which four simdgroups each occupy a GPU; fewer tiles have up to eight."""
_MOST_SIMDGROUPS, _FEWER_SIMDGROUPS = 8, 4
_ROWS_OF_PART, _LANES = 4, 32
"""One row of x: rows of the matrix that a simdgroup multiplies, and its lanes, each with a run of numbers at a time."""
ROW_WIDTHS = {"wide": 4096, "narrow": 1536, "wide uneven": 3712, "narrow uneven": 1664}
"""Classes of shapes for products of one row, with the width at which each is timed. MLX has one kernel for even shapes and another for
uneven ones; narrow matrices do not occupy a large GPU."""
_NARROW, _EVEN_N, _EVEN_K = 2048, 8, 512
"""Results below which a matrix is narrow; divisors of N and K in an even shape."""
_ENOUGH_PARTS = 48
"""Simdgroups that occupy a GPU core, about twice as many as it runs at a time. If a matrix has fewer blocks of four rows per core, several
simdgroups share each block."""
_THREADS = 256
_PADDED = 8
"""Smaller arrays are passed in another address space."""

Shape = tuple[int, ...]


_VARIANTS = tuple(next(most for most in ROWS if rows <= most) for rows in range(ROWS[-1]))


def rows_of_variant(rows: int) -> int:
    """Return the element of `ROWS` that computes this many rows."""
    return _VARIANTS[rows] if rows < len(_VARIANTS) else ROWS[-1]


def quantized_matmul(
    x: mx.array,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    *,
    bits: int,
    group_size: int,
    mode: str = "affine",
    gate: str = "",
) -> mx.array:
    """Multiply x `[rows, K]` by MLX's quantized matrix `[N, K]`, transposed: `[rows, N]` in the dtype of x.

    With a `gate` of `GATES`: `gate(first half of the columns) * second half`, `[rows, N / 2]`, rounded once; at most 8 rows. `weight` is
    uint32 `[N, K * bits / 32]`; `scales` and `biases` are `[N, K / group_size]`: in the dtype of x for mode "affine", uint8 and None for
    "mxfp4". The matrix is read once per 16 rows; sums are float32. Raises ValueError for arrays that do not fit together, and
    `UnsupportedShapeError` for a format without a kernel.
    """
    launch = launch_of(x, weight, scales, biases, bits=bits, group_size=group_size, mode=mode, gate=gate)
    return launch.run([x, *parts_of(weight, scales, biases)])[0]


def launch_of(
    x: mx.array,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    *,
    bits: int,
    group_size: int,
    mode: str,
    gate: str = "",
) -> Launch:
    """Return the launch of `quantized_matmul` for arrays of these shapes, which callers may cache. Raises the errors of
    `quantized_matmul`."""
    parts = [weight, scales] if biases is None else [weight, scales, biases]
    return _of_codes(x.shape, x.dtype, tuple((a.shape, a.dtype) for a in parts), bits, group_size, mode, gate)


def parts_of(weight: mx.array, scales: mx.array, biases: mx.array | None) -> list[mx.array]:
    """Return a matrix as inputs of its kernel."""
    parts = [weight, scales] if biases is None else [weight, scales, biases]
    if scales.size < _PADDED:
        parts[1:] = [mx.pad(a.reshape(-1), (0, _PADDED - a.size)) for a in parts[1:]]
    return parts


def why_unsupported(dtype: mx.Dtype, bits: int, group_size: int, mode: str, scales: mx.Dtype) -> str | None:
    """Return the reason why these products have no kernel; None if they have one."""
    if dtype not in FLOATS:
        return f"no products of {dtype}; there are float32, float16 and bfloat16"
    if mode == "mxfp4":
        return None if (bits, group_size, scales) == (4, 32, mx.uint8) else f"no mxfp4 of {bits} bits in groups of {group_size}"
    if mode != "affine" or bits not in BITS or group_size not in GROUPS:
        return f"no products with {mode} codes of {bits} bits in groups of {group_size}; there are affine {BITS} in {GROUPS}, and mxfp4"
    return None if scales == dtype else f"no products of {dtype} with scales of {scales}, which MLX would compute in float32"


def block_matmul(x: mx.array, weight: mx.array, kind: str) -> mx.array:
    """Multiply x `[rows, K]` by a matrix `[N, K]` of GGUF blocks, transposed: `[rows, N]` in the dtype of x.

    `weight` is uint8 `[N, bytes of a row]`, as in the file; `kind` is a name in `BLOCKS`. The matrix is read once per 16 rows. Its numbers
    are not rounded; sums are float32. Raises ValueError and `UnsupportedShapeError`.
    """
    return _of_blocks(x.shape, x.dtype, weight.shape, weight.dtype, kind).run([x, weight])[0]


def block_dequantize(weight: mx.array, kind: str, dtype: mx.Dtype) -> mx.array:
    """Unpack a matrix of GGUF blocks, uint8 `[N, bytes of a row]`, to numbers `[N, K]`, each rounded once. Raises ValueError and
    `UnsupportedShapeError`."""
    return _of_unpacking(weight.shape, weight.dtype, kind, dtype).run([weight])[0]


@lru_cache(_KNOWN_SHAPES)
def _of_codes(
    x: Shape, dtype: mx.Dtype, parts: tuple[tuple[Shape, mx.Dtype], ...], bits: int, group_size: int, mode: str, gate: str
) -> Launch:
    rows, k = _rows_of(x)
    if problem := why_unsupported(dtype, bits, group_size, mode, parts[1][1]):
        raise UnsupportedShapeError(problem)
    n = parts[0][0][0]
    groups = [(n, k // group_size)] * (2 if mode == "affine" else 1)
    expected = [(n, k * bits // 32), *groups]
    if [shape for shape, _ in parts] != expected or k % group_size or parts[0][1] != mx.uint32:
        raise ValueError(f"a matrix of {[list(shape) for shape, _ in parts]} does not multiply rows of {k}; expected {expected}")
    if gate and (gate not in GATES or n % 2 or rows > GATED_ROWS[-1]):
        raise UnsupportedShapeError(f"no products of {rows} rows gated by {gate} into {n} columns; up to 8 rows, {', '.join(GATES)}")
    if n * k * bits < 32 * _PADDED:
        raise UnsupportedShapeError(f"no products with a matrix of {n} by {k}, which is smaller than {_PADDED} words")
    template: list[tuple[str, int | mx.Dtype]] = [("T", dtype), ("GATE", GATES.get(gate, 0))]
    if mode == "affine":
        template += [("BITS", bits), ("GROUP", group_size)]
    if rows == 1:
        return _one_row(f"{mode}_vector", template, n, k, dtype, bits, sides=2 if gate else 1)
    template.append(("ROWS", rows_of_variant(rows)))
    return _product(_CODES_FILE, f"{mode}_matmul", template, rows, n, k, dtype, sides=2 if gate else 1)


@lru_cache(_KNOWN_SHAPES)
def _of_blocks(x: Shape, dtype: mx.Dtype, weight: Shape, stored: mx.Dtype, kind: str) -> Launch:
    rows, k = _rows_of(x)
    n, columns = _numbers_of(weight, stored, kind)
    if columns != k or dtype not in FLOATS:
        raise ValueError(f"rows of {k} numbers in {dtype} cannot be multiplied with rows of {columns}, in {kind}")
    template: list[tuple[str, int | mx.Dtype]] = [("T", dtype), ("ROWS", rows_of_variant(rows)), ("TYPE", BLOCKS[kind].id)]
    return _product(_BLOCKS_FILE, "block_matmul", template, rows, n, k, dtype)


@lru_cache(_KNOWN_SHAPES)
def _of_unpacking(weight: Shape, stored: mx.Dtype, kind: str, dtype: mx.Dtype) -> Launch:
    n, k = _numbers_of(weight, stored, kind)
    threads = -(-n * k // _PIECE // _THREADS) * _THREADS
    template: list[tuple[str, int | mx.Dtype]] = [("T", dtype), ("TYPE", BLOCKS[kind].id)]
    return Launch(_BLOCKS_FILE, "block_dequantize", template, [(n, k)], [dtype], (threads, 1, 1), (_THREADS, 1, 1))


def _product(
    file: str, name: str, template: list[tuple[str, int | mx.Dtype]], rows: int, n: int, k: int, dtype: mx.Dtype, *, sides: int = 1
) -> Launch:
    threads = 32 * simdgroups_of(n, k)
    grid = (threads * -(-n // _COLUMNS), -(-rows // rows_of_variant(rows)), 1)
    return Launch(file, name, template, [(rows, n // sides)], [dtype], grid, (threads, 1, 1))


def _one_row(name: str, template: list[tuple[str, int | mx.Dtype]], n: int, k: int, dtype: mx.Dtype, bits: int, *, sides: int) -> Launch:
    shares, blocks = parts_of_row(n, k, bits)
    groups = -(-n // (_ROWS_OF_PART * blocks))
    threads = _LANES * shares
    return Launch(_ROW_FILE, name, template, [(1, n // sides)], [dtype], (threads * groups, blocks, 1), (threads, blocks, 1))


def row_class(n: int, k: int, *, gated: bool = False) -> str:
    """Return the class in `ROW_WIDTHS` of a product of one row and a matrix `[n, k]`."""
    uneven = n % _EVEN_N or k % _EVEN_K
    return ("narrow" if n < _NARROW * (1 + gated) else "wide") + (" uneven" if uneven else "")


def parts_of_row(n: int, k: int, bits: int, cores: int | None = None) -> tuple[int, int]:
    """Return how many simdgroups share the K of four rows, and how many such blocks a threadgroup has, for a product of one row.

    `cores` are those of the GPU, by default this machine's. Threadgroups have at least two simdgroups if there is enough to do. Each share
    has a run for its first lane.
    """
    enough = _ENOUGH_PARTS * (cores or gpu_cores())
    runs = k // (16 if bits == 8 else 32)
    steps, all_blocks = -(-runs // _LANES), -(-n // _ROWS_OF_PART)
    shares = 1
    while shares < min(_MOST_SIMDGROUPS, steps) and shares * all_blocks < enough:
        shares *= 2
    shares = min(shares, steps)
    return shares, 1 if shares > 1 or all_blocks == 1 else 2


def simdgroups_of(n: int, k: int) -> int:
    """Return the number of simdgroups that share the K of a tile: as few as finish together, at most 8, or 4 with many tiles."""
    steps = -(-k // (_PIECE * _PIECES))
    most = _FEWER_SIMDGROUPS if -(-n // _COLUMNS) >= _MANY_TILES else _MOST_SIMDGROUPS
    rounds = -(-steps // most)
    return -(-steps // rounds)


def _rows_of(x: Shape) -> tuple[int, int]:
    if len(x) != 2 or not all(x) or x[1] % _PIECE:
        raise ValueError(f"rows to multiply are {list(x)}; expected [rows, K] with a K that {_PIECE} divides")
    return x[0], x[1]


def _numbers_of(weight: Shape, stored: mx.Dtype, kind: str) -> tuple[int, int]:
    """Return N and K."""
    if kind not in BLOCKS:
        raise UnsupportedShapeError(f"no products with {kind}; there are {', '.join(BLOCKS)}")
    form = BLOCKS[kind]
    if len(weight) != 2 or stored != mx.uint8 or not all(weight) or weight[1] % form.bytes:
        raise ValueError(f"a matrix of {kind} is {stored}{list(weight)}; expected uint8 [N, a multiple of {form.bytes}]")
    return weight[0], weight[1] // form.bytes * form.numbers
