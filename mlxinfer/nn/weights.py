"""Matrices, and how a model asks for its weights.

A model is built by asking a `Weights` for every tensor it needs, by name and shape; nothing is created first and
filled later. The same constructor therefore serves to load (tensors are read one at a time), to check a checkpoint
before a byte of it is read, and to plan a conversion: each is another `Weights`.

Names and layouts are those of mlx-lm's converted directories, which for most tensors are those of Hugging Face.
Where the layouts differ, the model also gives the `Recipe`s by which the tensor is made from other ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Union

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Dense:
    """A plain matrix `[..., out, in]` in a floating dtype."""

    weight: mx.array

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.weight.shape)


@dataclass(frozen=True, slots=True)
class Format:
    """How a matrix is quantized: `mode` is "affine", "mxfp4", "mxfp8" or "nvfp4", groups run along the input."""

    bits: int
    group_size: int
    mode: str = "affine"


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix in MLX's packed form: `weight` uint32 `[..., out, in * bits / 32]`, `scales` and `biases` `[..., out, in / group]`."""

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    format: Format

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.weight.shape[:-1], self.weight.shape[-1] * 32 // self.format.bits)

    def dequantize(self, dtype: mx.Dtype) -> mx.array:
        """The numbers themselves, computed in this dtype: with scales of 16 bits MLX would compute in those."""
        f = self.format
        scales, biases = self.scales, self.biases
        if biases is not None:
            scales, biases = scales.astype(dtype), biases.astype(dtype)
        return mx.dequantize(self.weight, scales, biases, f.group_size, f.bits, f.mode).astype(dtype)

    def each(self, operation: Callable[[mx.array], mx.array]) -> Quantized:
        """Apply an operation on rows (never on the packed input axis) to weight, scales and biases alike."""
        biases = None if self.biases is None else operation(self.biases)
        return replace(self, weight=operation(self.weight), scales=operation(self.scales), biases=biases)


Matrix = Union[Dense, Quantized]


def map_rows(matrix: Matrix, operation: Callable[[mx.array], mx.array]) -> Matrix:
    """Select, split or reorder rows; the same operation is right for plain and packed matrices."""
    if isinstance(matrix, Quantized):
        return matrix.each(operation)
    return Dense(operation(matrix.weight))


def join(matrices: Sequence[Matrix], operation: Callable[[list[mx.array]], mx.array]) -> Matrix:
    """Concatenate or stack matrices of one form along rows or a new leading axis. Raises ValueError if their formats differ."""
    first = matrices[0]
    if isinstance(first, Dense):
        if not all(isinstance(m, Dense) for m in matrices):
            raise ValueError("plain and quantized matrices cannot be joined")
        return Dense(operation([m.weight for m in matrices]))
    quantized = [m for m in matrices if isinstance(m, Quantized) and m.format == first.format]
    if len(quantized) != len(matrices):
        raise ValueError("matrices of different quantization cannot be joined")
    biases = None if first.biases is None else operation([m.biases for m in quantized if m.biases is not None])
    return Quantized(operation([m.weight for m in quantized]), operation([m.scales for m in quantized]), biases, first.format)


def concat(matrices: Sequence[Matrix]) -> Matrix:
    """One matrix with the rows of all."""
    return matrices[0] if len(matrices) == 1 else join(matrices, lambda arrays: mx.concatenate(arrays, axis=-2))


def stack(matrices: Sequence[Matrix]) -> Matrix:
    """`[n, out, in]` of n matrices `[out, in]`: the experts of a layer."""
    return join(matrices, mx.stack)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make a tensor that the checkpoint does not have from ones that it has.

    `shapes` are what the sources must have; `make` gets them as read, in order. A recipe applies when all its sources exist.
    """

    sources: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    make: Callable[[list[Matrix]], Matrix]


class Weights(Protocol):
    """Where a model under construction gets its tensors. Implementations remember what was asked for."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint has this tensor (for example, a head of its own besides the embedding)."""
        ...

    def matrix(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), quantizable: bool = True) -> Matrix:
        """A matrix `[..., out, in]`, possibly quantized. `quantizable=False` keeps a conversion from quantizing it (routers)."""
        ...

    def vector(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), dtype: mx.Dtype | None = None) -> mx.array:
        """Any tensor that is never quantized (norms, biases, sinks, convolutions), in the compute dtype unless another is named."""
        ...
