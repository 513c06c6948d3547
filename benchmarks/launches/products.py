"""Launches of matrix products: the kernel that MLX chooses, and how often the kernel reads and unpacks the matrix.

From metal/quantized.cpp and metal/matmul.cpp. Few rows use matrix-vector kernels. On M1 and M2 these read and unpack an affine matrix for
every row. From M3 on, `qmv_wide` does so once for up to 5 rows. Many rows use tiles of 32, each of which reads and unpacks the matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .graph import Node
from .layout import Laid
from .primitives import Architecture, Launch, Outcome, after, made, ready

_TILE = 32
"""Rows of a tile of a matrix-matrix kernel."""
_TOGETHER = 5
"""Rows per read of the matrix by the wide matrix-vector kernels."""
_WIDE_SINCE = 15
"""First generation with the wide kernels (`use_qmv_wide`, `gemv_wide_config`)."""


def vector_limit(columns: int, outputs: int, gpu: Architecture) -> int:
    """Least rows for which a quantized product uses tiles: `get_qmv_batch_limit`."""
    size = 0 if columns <= 2048 and outputs <= 2048 else 1 if columns <= 4096 and outputs <= 4096 else 2
    if gpu.size == "d":
        return (32, 18, 12)[size]
    if gpu.generation >= 17:
        return (33, 25, 13)[size]
    if gpu.generation >= 15:
        return (13, 15, 13)[size]
    return (14, 10, 6)[size]


def _fit(array: Laid) -> bool:
    """`ensure_row_contiguous_matrix`: True if the last two axes have no gaps."""
    return array.strides[-1] == 1 and (len(array.shape) < 2 or array.strides[-2] == array.shape[-1])


def quantized(node: Node, inputs: Sequence[Laid], outputs: Sequence[Laid], gpu: Architecture) -> Outcome:
    launches: list[Launch] = []
    x, weight, out = ready(inputs[0], node.name, launches, fine=_fit(inputs[0])), inputs[1], outputs[0]
    columns, width = x.shape[-1], out.shape[-1]
    rows = x.size // columns if len(weight.shape) == 2 and x.in_rows else x.shape[-2]
    matrix = sum(a.bytes for a in inputs[1:])
    affine, group, transposed = len(inputs) == 4, node.arguments[0], node.arguments[-1]
    numbers = weight.size * columns * width // (weight.shape[-1] * weight.shape[-2]) if transposed else columns * width
    tiled = rows >= (vector_limit(columns, width, gpu) if transposed else 4)
    if tiled:
        passes = math.ceil(rows / _TILE)
    elif rows >= 2 and (not affine or gpu.generation >= _WIDE_SINCE):
        passes = math.ceil(rows / _TOGETHER)
    else:
        passes = rows
    halves = _split_tiles(rows, width, columns, group) if tiled and out.size == rows * width else 1
    stage = after([x, *inputs[1:]])
    extra = halves * out.bytes if halves > 1 else 0
    launches.append(
        Launch(
            node.name, x.bytes + passes * matrix, extra or out.bytes, stage, (passes - 1) * matrix, passes * matrix,
            operations=2 * out.size * columns, unpacked=passes * numbers, on_matrix_units=tiled,
        )
    )  # fmt: skip
    return _summed(launches, extra, outputs)


def _split_tiles(rows: int, width: int, columns: int, group: int) -> int:
    """`qmm_splitk`: number of parts of the columns if tiles are few."""
    parts = max(1, 512 // (math.ceil(width / 32) * math.ceil(rows / 32)))
    align = max(group, 32)
    parts = min(parts, columns // align)
    while parts > 1 and columns % (parts * align):
        parts -= 1
    return parts


def gathered(node: Node, inputs: Sequence[Laid], outputs: Sequence[Laid], gpu: Architecture) -> Outcome:
    """Products with experts. Every row reads its own matrix, unless many rows are sorted by expert."""
    launches: list[Launch] = []
    x, out = ready(inputs[0], node.name, launches, fine=_fit(inputs[0])), outputs[0]
    stored = inputs[1:-2]
    experts = math.prod(stored[0].shape[:-2])
    each = sum(a.bytes for a in stored) // experts
    rows, columns = out.shape[-2], x.shape[-1]
    batch = out.size // rows // out.shape[-1]
    distinct = min(batch, experts) * each
    sorted_rows = bool(node.arguments and node.arguments[-1] is True)
    together = rows == 1 and batch >= 16 and sorted_rows and batch // experts >= 4
    asked = distinct * math.ceil(batch / experts / 16) if together else batch * each
    stage = after([x, *inputs[1:]])
    numbers = columns * out.shape[-1]
    launches.append(
        Launch(
            node.name, x.bytes + asked, out.bytes, stage, asked - distinct, asked,
            operations=2 * out.size * columns, unpacked=asked // each * numbers if len(stored) > 1 else 0, on_matrix_units=together,
        )
    )  # fmt: skip
    return launches, made(outputs, stage)


def plain(node: Node, inputs: Sequence[Laid], outputs: Sequence[Laid], gpu: Architecture) -> Outcome:
    """Matmul, and AddMM, whose third input is added."""
    launches: list[Launch] = []
    a, b = (ready(m, node.name, launches, fine=_strided(m)) for m in inputs[:2])
    out, columns = outputs[0], a.shape[-1]
    rows, width = out.shape[-2] if len(out.shape) > 1 else 1, out.shape[-1]
    alone = out.size == rows * width
    few = rows == 1 or width == 1
    wide = not few and rows <= 3 * _TOGETHER and gpu.generation >= _WIDE_SINCE and out.dtype.size == 2
    passes = math.ceil(rows / _TOGETHER) if wide else 1 if few else math.ceil(rows / _TILE)
    small = math.ceil(rows / 16) * math.ceil(width / 16) <= (2048 if gpu.size in "sd" else 1024)
    split = alone and not (few or wide) and small and columns // 16 >= 8 and columns >= max(rows, width)
    stage = after([a, b, *inputs[2:]])
    read = a.bytes + passes * b.bytes + sum(c.bytes for c in inputs[2:])
    weights = len(b.shape) == 2
    launches.append(
        Launch(
            node.name, read, out.bytes * (2 if split else 1), stage, (passes - 1) * b.bytes, passes * b.bytes if weights else 0,
            operations=2 * out.size * columns, on_matrix_units=not (few or wide),
        )
    )  # fmt: skip
    return _summed(launches, 2 * out.bytes * split, outputs)


def _summed(launches: list[Launch], parts: int, outputs: Sequence[Laid]) -> Outcome:
    """The outcome of a product, with a launch that adds up `parts`, the bytes of a split product's partial results."""
    if parts:
        launches.append(Launch("sum of split product", parts, outputs[0].bytes, launches[-1].stage + 1))
    return launches, made(outputs, launches[-1].stage)


def _strided(array: Laid) -> bool:
    """`check_transpose` in metal/matmul.cpp: True if rows or columns have no gaps."""
    if len(array.shape) < 2:
        return array.strides[-1:] in ((), (1,))
    return 1 in array.strides[-2:]
