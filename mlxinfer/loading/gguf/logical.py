"""Logical tensors: what a model asks for, made from the tensors of the file by undoing what llama.cpp's converter did to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from ...nn.weights import Dense, Format, Matrix, concat, map_rows, numbers
from .reader import TensorInfo
from .tensors import stored

Operation = Callable[[mx.array], mx.array]


@dataclass(frozen=True, slots=True)
class Logical:
    """A tensor of the model: which tensors of the file it is made from, how, and what comes out."""

    sources: tuple[str, ...]
    shape: tuple[int, ...]
    stored: Format | mx.Dtype
    nbytes: int
    make: Callable[[list[Matrix]], Matrix]


def unchanged(info: TensorInfo) -> Logical:
    return Logical((info.name,), info.shape, stored(info), info.nbytes, lambda matrices: matrices[0])


def rows(info: TensorInfo, operation: Operation) -> Logical:
    """Reorder rows (entries, of a vector), which is right for packed matrices as well."""
    return Logical((info.name,), info.shape, stored(info), info.nbytes, lambda matrices: map_rows(matrices[0], operation))


def values(info: TensorInfo, operation: Operation, shape: tuple[int, ...] | None = None) -> Logical:
    """Compute on the numbers themselves, in float32."""
    return Logical((info.name,), shape or info.shape, mx.float32, info.nbytes, lambda matrices: Dense(operation(numbers(matrices[0]))))


def joined_rows(infos: list[TensorInfo], operation: Operation) -> Logical:
    """The rows of several matrices one below the other, then reordered; packed if they are packed alike."""
    forms = [stored(info) for info in infos]
    alike = all(form == forms[0] for form in forms)
    count = sum(info.shape[-2] for info in infos)

    def make(matrices: list[Matrix]) -> Matrix:
        same = matrices if alike else [Dense(numbers(matrix)) for matrix in matrices]
        return map_rows(concat(same), operation)

    form = forms[0] if alike else mx.float32
    return Logical(tuple(info.name for info in infos), (count, infos[0].shape[-1]), form, sum(info.nbytes for info in infos), make)


def columns(info: TensorInfo, operation: Operation, run: int) -> Logical:
    """Reorder columns in whole runs of `run`. `operation` gets `[rows, columns / run, run]`, whatever a run is packed into."""
    form = stored(info)
    packed = isinstance(form, Format) and not info.kept and run % form.group_size == 0
    count = info.shape[-1] // run

    def reorder(array: mx.array) -> mx.array:
        return operation(array.reshape(*array.shape[:-1], count, -1)).reshape(array.shape)

    def make(matrices: list[Matrix]) -> Matrix:
        matrix = matrices[0]
        if isinstance(matrix, Dense):
            return Dense(reorder(matrix.weight))
        return matrix.each(reorder) if packed else Dense(reorder(numbers(matrix)))

    kept = form if packed or not isinstance(form, Format) else mx.float32
    return Logical((info.name,), info.shape, kept, info.nbytes, make)
