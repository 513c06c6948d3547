"""The weights of a model, read from a checkpoint one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from ..nn.tree import arrays
from ..nn.weights import Dense, Format, InFile, Matrix, Quantized, Recipe
from .checkpoint import Checkpoint
from .dtypes import dtype_name, loses_precision
from .ledger import Kind, Ledger, Request

Progress = Callable[[int, int], None]
"""Told how many bytes of how many are done."""


class CheckpointWeights:
    """Implements `Weights`: every tensor is read, made by its recipe, cast to `dtype` and evaluated when it is asked for.

    `quantize` packs, on the way, the matrices that are stored plain and may be quantized. Problems are collected (what is missing
    comes as zeros meanwhile); `finish` raises them all in one `WeightsError`.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: mx.Dtype, *, quantize: Format | None = None, progress: Progress | None = None
    ) -> None:
        self.ledger = Ledger(checkpoint)
        self.dtype = dtype
        self.rounded: dict[str, str] = {}
        """Tensors whose cast to `dtype` may have lost precision, with the dtype they had."""
        self._quantize = quantize
        self._progress = progress
        self._total = sum(checkpoint.nbytes(name) for name in checkpoint.names()) if progress else 0
        self._done = 0

    def has(self, name: str) -> bool:
        return self.ledger.has(name)

    def matrix(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), quantizable: bool = True) -> Matrix:
        matrix = self._get(name, shape, "matrix", otherwise, quantizable, None)
        if self._quantize and quantizable and isinstance(matrix, Dense) and can_quantize(shape, self._quantize):
            matrix = quantize(matrix.weight, self._quantize)
        return settle(matrix)

    def vector(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), dtype: mx.Dtype | None = None) -> mx.array:
        matrix = settle(self._get(name, shape, "vector", otherwise, False, dtype))
        assert isinstance(matrix, Dense)
        return matrix.weight

    def finish(self) -> None:
        self.ledger.finish()

    def _get(
        self, name: str, shape: tuple[int, ...], kind: Kind, otherwise: Sequence[Recipe], quantizable: bool, dtype: mx.Dtype | None
    ) -> Matrix:
        request = self.ledger.find(name, shape, kind, otherwise, quantizable, dtype)
        target = dtype or self.dtype
        if request is None:
            return Dense(mx.zeros(shape, target))
        matrix = make(self.ledger, request, [self.ledger.checkpoint.read(source) for source in request.sources])
        if not is_finite(matrix):
            self.ledger.add_problem(f"{name} holds NaN or infinite values")
        self._count(request)
        self._note_rounding(name, matrix, target)
        return cast(matrix, target)

    def _count(self, request: Request) -> None:
        if self._progress:
            self._done += sum(self.ledger.checkpoint.nbytes(source) for source in request.sources)
            self._progress(min(self._done, self._total), self._total)

    def _note_rounding(self, name: str, matrix: Matrix, target: mx.Dtype) -> None:
        if isinstance(matrix, InFile):
            return
        stored = matrix.scales.dtype if isinstance(matrix, Quantized) else matrix.weight.dtype
        if loses_precision(stored, target):
            self.rounded[name] = dtype_name(stored)


def make(ledger: Ledger, request: Request, sources: list[Matrix]) -> Matrix:
    """What the graph wants, from the sources as they were read. Where that fails, zeros, and a problem in the ledger."""
    try:
        matrix = sources[0] if request.recipe is None else request.recipe.make(sources)
    except ValueError as error:
        ledger.add_problem(f"{request.name} cannot be made from {request.sources[0]}: {error}")
        return Dense(mx.zeros(request.shape))
    if matrix.shape != request.shape:
        ledger.add_problem(
            f"{request.name}, made from {request.sources[0]}, has shape {list(matrix.shape)}, expected {list(request.shape)}"
        )
        return Dense(mx.zeros(request.shape))
    if request.kind == "vector" and not isinstance(matrix, Dense):
        ledger.add_problem(f"{request.name} is quantized, which is not understood for this tensor")
        return Dense(mx.zeros(request.shape))
    return matrix


def cast(matrix: Matrix, dtype: mx.Dtype) -> Matrix:
    """With its floating-point parts in this dtype; codes and 8-bit scales stay as they are."""
    if isinstance(matrix, Dense):
        return Dense(matrix.weight.astype(dtype))
    if isinstance(matrix, InFile) or matrix.biases is None:
        return matrix
    return Quantized(matrix.weight, matrix.scales.astype(dtype), matrix.biases.astype(dtype), matrix.format)


def can_quantize(shape: tuple[int, ...], form: Format) -> bool:
    return len(shape) >= 2 and shape[-1] % form.group_size == 0


def quantize(weight: mx.array, form: Format) -> Quantized:
    """MLX's own quantization of a matrix, its scales in the dtype of the weight."""
    parts = mx.quantize(weight, group_size=form.group_size, bits=form.bits, mode=form.mode)
    return Quantized(parts[0], parts[1], parts[2] if len(parts) > 2 else None, form)


def settle(matrix: Matrix) -> Matrix:
    """Evaluated, so that nothing which it was made from stays in memory."""
    mx.eval(*arrays(matrix))
    return matrix


def is_finite(matrix: Matrix) -> bool:
    """False if any value is NaN or infinite. For 8-bit scales, which have no infinity, if any is NaN. What is still in its file is
    checked when it is packed."""
    if isinstance(matrix, InFile):
        return True
    if isinstance(matrix, Dense):
        return is_finite_array(matrix.weight)
    if matrix.biases is not None:
        return is_finite_array(matrix.scales) and is_finite_array(matrix.biases)
    nan = 0xFF if matrix.format.mode.startswith("mx") else 0x7F
    return not mx.any((matrix.scales & 0x7F if nan == 0x7F else matrix.scales) == nan).item()


def is_finite_array(array: mx.array) -> bool:
    """False if any value is NaN or infinite."""
    # Extremes carry a NaN through, and unlike a sum they cannot overflow.
    if not array.size or not mx.issubdtype(array.dtype, mx.floating):
        return True
    return bool((mx.isfinite(mx.max(array)) & mx.isfinite(mx.min(array))).item())
