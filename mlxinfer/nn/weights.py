"""Matrices, and the `Weights` that a model requests them from.

A model is built by requesting every tensor by name and shape from a `Weights`; nothing is created first and filled later. The same
constructor therefore loads (tensors are read one at a time), checks a checkpoint before a byte of it is read, and plans a conversion: each
has its own `Weights`.

Names and layouts are those of mlx-lm's converted directories, which for most tensors are those of Hugging Face. For other layouts, the
model also supplies `Recipe`s that make the tensor from others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import field, replace
from itertools import accumulate, pairwise
from typing import Protocol, Union

import mlx.core as mx
import numpy as np

from ..kernels_metal.quantized_matmul.reference import columns_of_bytes, dequantized
from ..util.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Dense:
    """A plain matrix `[..., out, in]` in a floating dtype."""

    weight: mx.array
    """float32, float16 or bfloat16 `[..., out, in]`."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.weight.shape)


@dataclass(frozen=True, slots=True)
class Format:
    """Quantization of a matrix."""

    bits: int
    group_size: int
    """Numbers that share a scale, along the input axis."""
    mode: str = "affine"
    """"affine", "mxfp4", "mxfp8" or "nvfp4", or `FLOAT8`; for `RawBlocks` and `Blocks` the name of the GGUF type."""


FLOAT8 = "fp8"
"""Mode of 8-bit floats (E4M3) with float32 scales. MLX does not have it: only the CPU kernels multiply it."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix in MLX's quantized form, or in that of `FLOAT8`."""

    weight: mx.array
    """Codes, uint32 `[..., out, in * bits / 32]`."""
    scales: mx.array
    """`[..., out, in / group_size]`."""
    biases: mx.array | None
    """The same shape; None except in mode "affine"."""
    format: Format
    products: dict[tuple[object, ...], Callable[[mx.array], mx.array]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Products with this matrix by shape and dtype of rows, cached by `small_batch_matmul`."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.weight.shape[:-1], self.weight.shape[-1] * 32 // self.format.bits)

    def dequantize(self, dtype: mx.Dtype) -> mx.array:
        """Return the numbers `[..., out, in]`, computed in `dtype`; with 16-bit scales MLX would compute in theirs. float16 scales are not
        rounded to bfloat16, only the numbers are."""
        f = self.format
        scales, biases = self.scales, self.biases
        if f.mode == FLOAT8:
            codes = mx.from_fp8(self.weight.view(mx.uint8), mx.float32)
            return (codes * mx.repeat(scales, f.group_size, axis=-1)).astype(dtype)
        if biases is not None and (scales.dtype, dtype) != (mx.float16, mx.bfloat16):
            scales, biases = scales.astype(dtype), biases.astype(dtype)
        return mx.dequantize(self.weight, scales, biases, f.group_size, f.bits, f.mode).astype(dtype)

    def each(self, operation: Callable[[mx.array], mx.array]) -> Quantized:
        """Apply an operation on rows (never on the packed input axis) to weight, scales and biases alike."""
        biases = None if self.biases is None else operation(self.biases)
        return replace(self, weight=operation(self.weight), scales=operation(self.scales), biases=biases)


class FileRows(Protocol):
    """A matrix in a GGUF file, read row by row. It has no attributes, so `nn.packing.arrays` does not enter it."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """The file and the tensor, for messages."""
        ...

    @property
    def tensor(self) -> str:
        """The tensor's name in its file."""
        ...

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Read the blocks of these rows, uint8 `[rows, bytes of a row]`."""
        ...

    def forget(self) -> None:
        """Release the rows that were read last from resident memory."""
        ...

    def dequantize(self, blocks: np.ndarray) -> np.ndarray:
        """Convert the result of `read` to float32 `[rows, columns]`."""
        ...


@dataclass(frozen=True, slots=True)
class RawBlocks:
    """A matrix that stays in its GGUF file until it is packed for the native CPU products, which support more formats than MLX, or becomes
    `Blocks` on a GPU."""

    sources: tuple[FileRows, ...]
    """Stored matrices; rows are numbered consecutively across all of them."""
    counts: tuple[int, ...]
    rows: np.ndarray
    """int32 `[..., out]`: the numbers of this matrix's rows."""
    columns: int
    format: Format

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.rows.shape, self.columns)

    def each(self, operation: Callable[[mx.array], mx.array]) -> RawBlocks:
        """Apply an operation on rows, as `Quantized.each` does."""
        return replace(self, rows=np.array(operation(mx.array(self.rows)[..., None]))[..., 0])

    def pieces(self, rows: int) -> Iterator[np.ndarray]:
        """Yield the blocks of all rows in order, uint8 `[at most rows, bytes of a row]`. A piece is valid until the next one is
        requested."""
        for source, picked in self._runs(rows):
            yield source.read(picked)
            source.forget()

    def dequantize(self, dtype: mx.Dtype) -> mx.array:
        """Return the numbers `[..., out, columns]`, rounded to this dtype."""
        parts = [mx.array(source.dequantize(source.read(picked))).astype(dtype) for source, picked in self._runs(self.rows.size)]
        return mx.concatenate(parts).reshape(self.shape) if parts else mx.zeros(self.shape, dtype)

    def _runs(self, rows: int) -> Iterator[tuple[FileRows, np.ndarray]]:
        """Yield at most `rows` rows of one source at a time, with their numbers in it."""
        starts = np.cumsum([0, *self.counts])
        flat = self.rows.reshape(-1)
        for at in range(0, flat.size, rows):
            piece = flat[at : at + rows]
            which = np.searchsorted(starts, piece, side="right") - 1
            cuts = [0, *(np.flatnonzero(np.diff(which)) + 1).tolist(), piece.size]
            for begin, end in pairwise(cuts):
                yield self.sources[which[begin]], piece[begin:end] - starts[which[begin]]


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix of GGUF blocks in memory, byte for byte as in its file. Metal kernels multiply it; without them it is unpacked for each
    product."""

    weight: mx.array
    """uint8 `[..., out, bytes of a row]`."""
    format: Format
    """Format of the `RawBlocks` that were read."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.weight.shape[:-1], columns_of_bytes(self.format.mode, self.weight.shape[-1]))

    def dequantize(self, dtype: mx.Dtype) -> mx.array:
        """Return the numbers `[..., out, in]`, computed in float32 and rounded once."""
        return dequantized(self.weight, self.format.mode, dtype)

    def each(self, operation: Callable[[mx.array], mx.array]) -> Blocks:
        """Apply an operation on rows, as `Quantized.each` does."""
        return replace(self, weight=operation(self.weight))


Matrix = Union[Dense, Quantized, RawBlocks, Blocks]


def map_rows(matrix: Matrix, operation: Callable[[mx.array], mx.array]) -> Matrix:
    """Select, split or reorder rows; the operation works on plain and packed matrices alike."""
    if isinstance(matrix, Dense):
        return Dense(operation(matrix.weight))
    return matrix.each(operation)


def numbers(matrix: Matrix) -> mx.array:
    """Return all numbers of a matrix, in float32."""
    return matrix.weight.astype(mx.float32) if isinstance(matrix, Dense) else matrix.dequantize(mx.float32)


def join(matrices: Sequence[Matrix], operation: Callable[[list[mx.array]], mx.array]) -> Matrix:
    """Concatenate or stack matrices of one format along rows or a new leading axis. Raises ValueError if their formats differ."""
    first = matrices[0]
    if isinstance(first, Dense):
        if not all(isinstance(m, Dense) for m in matrices):
            raise ValueError("plain and quantized matrices cannot be joined")
        return Dense(operation([m.weight for m in matrices if isinstance(m, Dense)]))
    if isinstance(first, RawBlocks):
        return _join_in_file([m for m in matrices if isinstance(m, RawBlocks) and m.format == first.format], len(matrices), operation)
    if isinstance(first, Blocks):
        blocks = [m.weight for m in matrices if isinstance(m, Blocks) and m.format == first.format]
        if len(blocks) != len(matrices):
            raise ValueError("matrices of different quantization cannot be joined")
        return Blocks(operation(blocks), first.format)
    quantized = [m for m in matrices if isinstance(m, Quantized) and m.format == first.format]
    if len(quantized) != len(matrices):
        raise ValueError("matrices of different quantization cannot be joined")
    assert isinstance(first, Quantized)
    biases = None if first.biases is None else operation([m.biases for m in quantized if m.biases is not None])
    return Quantized(operation([m.weight for m in quantized]), operation([m.scales for m in quantized]), biases, first.format)


def _join_in_file(blocks: list[RawBlocks], wanted: int, operation: Callable[[list[mx.array]], mx.array]) -> RawBlocks:
    if len(blocks) != wanted:
        raise ValueError("matrices of different quantization cannot be joined")
    sources = tuple(source for b in blocks for source in b.sources)
    counts = tuple(count for b in blocks for count in b.counts)
    starts = accumulate((sum(b.counts) for b in blocks), initial=0)
    rows = operation([mx.array(b.rows + start)[..., None] for b, start in zip(blocks, starts, strict=False)])
    return replace(blocks[0], sources=sources, counts=counts, rows=np.array(rows)[..., 0])


def concat(matrices: Sequence[Matrix]) -> Matrix:
    """Join the rows of all matrices."""
    return matrices[0] if len(matrices) == 1 else join(matrices, lambda arrays: mx.concatenate(arrays, axis=-2))


def stack(matrices: Sequence[Matrix]) -> Matrix:
    """Stack n matrices `[out, in]` to one `[n, out, in]`: the experts of a layer."""
    return join(matrices, mx.stack)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Makes a tensor that the checkpoint lacks from others. It applies if all its sources exist."""

    sources: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Required shape of each source."""
    make: Callable[[list[Matrix]], Matrix]
    """Makes the tensor from the sources as read, in order."""


class Weights(Protocol):
    """Supplies the tensors of a model under construction. Implementations record the requests."""

    def has(self, name: str) -> bool:
        """True if the checkpoint has this tensor (for example an output head in addition to the embedding)."""
        ...

    def matrix(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), quantizable: bool = True) -> Matrix:
        """Return a matrix `[..., out, in]`, possibly quantized. With `quantizable=False`, a conversion does not quantize it (routers)."""
        ...

    def vector(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), dtype: mx.Dtype | None = None) -> mx.array:
        """Return a tensor that is never quantized (norms, biases, sinks, convolutions), in the compute dtype unless `dtype` is given."""
        ...


def load_convolution(weights: Weights, name: str, channels: int, taps: int, source: str = "") -> mx.array:
    """Load a causal convolution of each channel, `[channels, taps, 1]`. Hugging Face stores `[channels, 1, taps]`, under the name `source`
    if it differs."""

    def move_taps(sources: list[Matrix]) -> Matrix:
        return map_rows(sources[0], lambda weight: weight.swapaxes(1, 2))

    stored = Recipe((f"{source or name}.weight",), ((channels, 1, taps),), move_taps)
    return weights.vector(f"{name}.weight", (channels, taps, 1), otherwise=[stored])
