"""Matrices of GGUF blocks that no kernel multiplies any more: unpacked once and for all, as far as there is memory."""

from __future__ import annotations

import math
from collections.abc import Iterable

import mlx.core as mx

from ..util.dataclass import dataclass
from .linear import Embedding, Linear
from .packing import holders
from .small_batch_matmul import UNPACKED_BYTES, block_rows, multiplies_blocks
from .weights import Blocks, Dense


@dataclass(frozen=True, slots=True)
class Unpacking:
    """Matrices that are to be unpacked to 16 bits."""

    chosen: list[Linear | Embedding]
    """What holds them."""
    total: int
    """How many have no kernel; the others are unpacked for every product."""
    nbytes: int
    """Bytes by which the chosen ones grow together."""
    dtype: mx.Dtype
    """What they are unpacked to, that of activations."""

    def run(self) -> None:
        """Unpack them, one after another."""
        for holder in self.chosen:
            if isinstance(holder.matrix, Blocks):
                holder.matrix = _unpacked(holder.matrix, self.dtype)


def unpacking(models: Iterable[object], dtype: mx.Dtype, room: float = math.inf) -> Unpacking:
    """What can be unpacked of the matrices whose kernel was given up, if they grow by at most `room` bytes together."""
    chosen: list[Linear | Embedding] = []
    total = nbytes = 0
    for model in models:
        for holder in holders(model):
            matrix = holder.matrix
            if not isinstance(matrix, Blocks) or len(matrix.shape) != 2 or multiplies_blocks(matrix.format, dtype):
                continue  # matrices of experts never have a kernel
            total += 1
            growth = math.prod(matrix.shape) * dtype.size - matrix.weight.nbytes
            if nbytes + growth <= room:
                chosen.append(holder)
                nbytes += growth
    return Unpacking(chosen, total, nbytes, dtype)


def _unpacked(matrix: Blocks, dtype: mx.Dtype) -> Dense:
    """In slices: numbers are float32 before they are rounded."""
    rows, columns = matrix.shape
    step = max(UNPACKED_BYTES // (columns * dtype.size) // 16 * 16, 16)
    pieces = []
    for at in range(0, rows, step):
        pieces.append(block_rows(matrix.weight[at : at + step], matrix.format, dtype))
        mx.eval(pieces[-1])
    weight = pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)
    mx.eval(weight)
    return Dense(weight)
