"""Matrices of a loaded model in the layout of the native CPU products, where those are there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import mlx.core as mx

from .. import kernels_cpu
from ..device import is_gpu
from ..errors import WeightsError
from .linear import Embedding, Linear
from .tree import arrays, objects
from .weights import Dense, InFile, Matrix

_BLOCK_COLUMNS = 32
"""Quantized rows are packed in multiples of this; nvfp4, whose groups have 16, can have others."""

_PIECE = 4 << 20
"""Bytes of a GGUF file that are in memory at a time."""


class Copies(Protocol):
    """Packed matrices of a GGUF file that were kept when it was loaded before."""

    def find(self, blocks: InFile, precision: str | None) -> kernels_cpu.Packed | None: ...

    def add(self, blocks: InFile, packed: kernels_cpu.Packed) -> None:
        """Take note of one that `find` did not have."""
        ...


def settle(part: object, *, precision: str | None = None, copies: Copies | None = None) -> None:
    """Evaluate a finished part of a model, packed where that makes products faster. For the `ready` of a graph.

    `precision` is that of the activations in packed products (`kernels_cpu.PRECISIONS`), None the default.
    """
    if not is_gpu() and kernels_cpu.available():
        for holder in _holders(part):
            if not isinstance(holder.matrix, kernels_cpu.Packed):
                holder.matrix = _packed(holder.matrix, precision, copies)
    mx.eval(list(arrays(part)))


def _holders(part: object) -> Iterator[Linear | Embedding]:
    return (node for node in objects(part) if isinstance(node, (Linear, Embedding)))


def _packed(matrix: Matrix, precision: str | None, copies: Copies | None) -> Matrix | kernels_cpu.Packed:
    if isinstance(matrix, InFile):
        packed = copies.find(matrix, precision) if copies else None
        if packed is None:
            packed = _packed_file(matrix, precision)
            if copies:
                copies.add(matrix, packed)
        return packed
    if isinstance(matrix, Dense):
        return kernels_cpu.pack(matrix.weight)
    f = matrix.format
    if matrix.shape[-1] % _BLOCK_COLUMNS:
        return matrix
    return kernels_cpu.pack(
        matrix.weight, matrix.scales, matrix.biases, group_size=f.group_size, bits=f.bits, mode=f.mode, precision=precision
    )


def _packed_file(blocks: InFile, precision: str | None) -> kernels_cpu.Packed:
    rows = max(_PIECE * 8 // (blocks.columns * blocks.format.bits), 1)
    try:
        return kernels_cpu.pack_gguf(blocks.format.mode, blocks.shape, blocks.pieces(rows), precision=precision)
    except ValueError as error:
        raise WeightsError(f"{', '.join(source.name for source in blocks.sources)}: {error}; download or convert the model again") from None
