"""Converts the matrices of a loaded model to the layout that products on this device read: panels for the CPU, blocks on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Protocol

import mlx.core as mx
import numpy as np

from .. import kernels_cpu
from ..errors import WeightsError
from ..kernels_metal.quantized_matmul.block_formats import BLOCKS
from ..util.device import is_gpu
from .activations import Activated
from .linear import Embedding, Linear
from .mlp import GatedMLP
from .moe import try_mixture
from .small_batch_matmul import row_shape, try_format
from .weights import Blocks, Dense, Matrix, Quantized, RawBlocks


def arrays(node: object) -> Iterator[mx.array]:
    """Yield every array reachable through attributes, dataclass fields, lists, tuples and dict values."""
    return (leaf for leaf in objects(node) if isinstance(leaf, mx.array))


def objects(node: object) -> Iterator[object]:
    """Yield every array and every object of this project reachable in the same ways, each once, `node` included, holders first."""
    seen: set[int] = set()
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if type(node) in _LEAVES:
            continue
        if isinstance(node, (list, tuple)):
            waiting.extend(reversed(node))
        elif isinstance(node, dict):
            waiting.extend(reversed(node.values()))
        elif id(node) not in seen and (held := _references(node)) is not None:
            seen.add(id(node))
            yield node
            waiting.extend(reversed(held))


_LEAVES = frozenset({int, float, bool, str, type(None), mx.Dtype})
"""Common types of attributes without references."""


def _references(node: object) -> list[object] | None:
    """Return the references of an array or an object of this project; None for anything else."""
    names = _field_names(type(node))  # type: ignore[arg-type]  # mypy takes object's __hash__ for that of the type
    if names is not None:
        return [getattr(node, name) for name in names]
    if hasattr(node, "__dict__") and type(node).__module__.startswith(_PROJECT):
        return list(vars(node).values())
    return None


_PROJECT = __package__.split(".")[0]


@cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    """Return the field names of a dataclass, () for an array, None for anything else."""
    if issubclass(kind, mx.array):
        return ()
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else None


_BLOCK_COLUMNS = 32
"""Quantized rows are packed in multiples of this; nvfp4, with groups of 16, may have other widths."""

_PIECE = 4 << 20
"""Bytes of a GGUF file in memory at a time."""


class Copies(Protocol):
    """Packed matrices of a GGUF file, saved by an earlier load."""

    def find(self, blocks: RawBlocks, precision: str | None) -> kernels_cpu.Packed | None: ...

    def add(self, blocks: RawBlocks, packed: kernels_cpu.Packed) -> None:
        """Save a matrix that `find` did not return."""
        ...


def settle(
    part: object,
    *,
    precision: str | None = None,
    copies: Copies | None = None,
    dtype: mx.Dtype | None = None,
) -> None:
    """Evaluate a finished part of a model in the fastest form for products. Pass it as the `ready` of a model.

    `precision` is the precision of activations in packed products (`kernels_cpu.PRECISIONS`); None is the default. On a GPU, GGUF blocks
    are read into memory, and new formats are tried: `dtype` is the dtype of activations.
    """
    if is_gpu():
        for holder in holders(part):
            if isinstance(holder.matrix, RawBlocks) and holder.matrix.format.mode in BLOCKS:
                holder.matrix = in_memory(holder.matrix)
            if dtype:
                _try_matrix(holder.matrix, dtype)
        for layer in list(objects(part)):
            if dtype and isinstance(layer, GatedMLP):
                _try_gate(layer, dtype)
            if dtype:
                try_mixture(layer, dtype)
    elif kernels_cpu.available():
        for holder in holders(part):
            if not isinstance(holder.matrix, kernels_cpu.Packed):
                holder.matrix = _packed_matrix(holder.matrix, precision, copies)
    mx.eval(list(arrays(part)))


def _try_gate(layer: GatedMLP, dtype: mx.Dtype) -> None:
    from ..kernels_metal.quantized_matmul.launcher import GATES  # only a GPU needs it

    matrix, gate = layer.gate_up.linears[0].matrix, layer.gate
    joined = len(layer.gate_up.linears) == 1 and isinstance(matrix, Quantized) and matrix.scales.dtype in (dtype, mx.uint8)
    if joined and isinstance(gate, Activated) and gate.activation in GATES:
        _try_matrix(matrix, dtype, gate.activation)


def _try_matrix(matrix: object, dtype: mx.Dtype, gate: str = "") -> None:
    if isinstance(matrix, (Quantized, Blocks)) and len(matrix.shape) == 2:
        computed = matrix.scales.dtype if isinstance(matrix, Quantized) and matrix.biases is not None else dtype
        try_format(matrix.format, computed, gate=gate)
        if isinstance(matrix, Quantized) and (shape := row_shape(matrix, gate)):
            try_format(matrix.format, computed, gate=gate, shape=shape)


def in_memory(matrix: RawBlocks) -> Blocks:
    """Read the blocks of a matrix from its file. Raises `WeightsError` for a scale that is not finite."""
    form = BLOCKS[matrix.format.mode]
    bytes_of_row = matrix.columns // form.numbers * form.bytes
    weight = mx.zeros((*matrix.shape[:-1], bytes_of_row), mx.uint8)
    mx.eval(weight)
    target, row = np.array(weight, copy=False).reshape(-1, bytes_of_row), 0
    for piece in matrix.pieces(max(_PIECE // bytes_of_row, 1)):
        blocks = piece.reshape(-1, form.bytes)
        for at in form.halves:
            if not np.isfinite(np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")).all():
                names = ", ".join(source.name for source in matrix.sources)
                raise WeightsError(f"{names}: a scale is NaN or infinite; download or convert the model again")
        target[row : row + len(piece)] = piece
        row += len(piece)
    return Blocks(weight, matrix.format)


def holders(part: object) -> Iterator[Linear | Embedding]:
    """Yield every layer with a matrix in a part of a model."""
    return (node for node in objects(part) if isinstance(node, (Linear, Embedding)))


def _packed_matrix(matrix: Matrix, precision: str | None, copies: Copies | None) -> Matrix | kernels_cpu.Packed:
    if isinstance(matrix, RawBlocks):
        packed = copies.find(matrix, precision) if copies else None
        if packed is None:
            packed = _packed_file(matrix, precision)
            if copies:
                copies.add(matrix, packed)
        return packed
    if isinstance(matrix, Dense):
        return kernels_cpu.pack(matrix.weight)
    if isinstance(matrix, Blocks):
        return matrix
    f = matrix.format
    if matrix.shape[-1] % _BLOCK_COLUMNS:
        return matrix
    return kernels_cpu.pack(
        matrix.weight, matrix.scales, matrix.biases, group_size=f.group_size, bits=f.bits, mode=f.mode, precision=precision
    )


def _packed_file(blocks: RawBlocks, precision: str | None) -> kernels_cpu.Packed:
    rows = max(_PIECE * 8 // (blocks.columns * blocks.format.bits), 1)
    try:
        return kernels_cpu.pack_gguf(blocks.format.mode, blocks.shape, blocks.pieces(rows), precision=precision)
    except ValueError as error:
        raise WeightsError(f"{', '.join(source.name for source in blocks.sources)}: {error}; download or convert the model again") from None
