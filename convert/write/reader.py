"""The source of a conversion, read in blocks of rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import mlx.core as mx

from ...loading.checkpoint import Checkpoint
from ...loading.directory import SafetensorsCheckpoint
from ...loading.weights import TensorRequest, settle
from ...nn.weights import Matrix, map_rows, stack

BLOCK = 1 << 24
"""Elements per block; a single row, or expert, may be larger."""


def can_read_rows(checkpoint: Checkpoint, request: TensorRequest) -> bool:
    """Whether it need not be read whole: a safetensors tensor, or several that are stacked."""
    plain = request.recipe is None or request.recipe.make is stack
    return plain and isinstance(checkpoint, SafetensorsCheckpoint) and bool(request.shape)


def blocks(checkpoint: Checkpoint, request: TensorRequest, size: int | None = None) -> Iterator[Matrix]:
    """The tensor in blocks `[rows, in]` (one axis for a vector) of about `size` elements, in order, `BLOCK` where that is None.

    Only one block is in memory at a time, unless the tensor has to be read whole.
    """
    size = BLOCK if size is None else size
    if can_read_rows(checkpoint, request):
        assert isinstance(checkpoint, SafetensorsCheckpoint)
        shape = request.shape if request.recipe is None else request.shape[1:]
        for source in request.sources:
            for first, last in _ranges(shape[0], math.prod(shape[1:]), size):
                yield _flat(checkpoint.read_rows(source, first, last))
        return
    matrix = _whole(checkpoint, request)
    rows = matrix.shape[0] if matrix.shape else 1
    for first, last in _ranges(rows, math.prod(matrix.shape[1:]), size):
        yield map_rows(matrix, partial(_rows, first=first, last=last))


def _rows(array: mx.array, first: int, last: int) -> mx.array:
    return array[first:last] if array.ndim else array


def _whole(checkpoint: Checkpoint, request: TensorRequest) -> Matrix:
    sources = [checkpoint.read(source) for source in request.sources]
    matrix = sources[0] if request.recipe is None else request.recipe.make(sources)
    return _flat(settle(matrix))


def _flat(matrix: Matrix) -> Matrix:
    return map_rows(matrix, lambda array: array.reshape(-1, array.shape[-1])) if len(matrix.shape) > 2 else matrix


def _ranges(rows: int, row: int, size: int) -> Iterator[tuple[int, int]]:
    step = max(1, size // max(row, 1))
    return ((first, min(first + step, rows)) for first in range(0, rows, step))
