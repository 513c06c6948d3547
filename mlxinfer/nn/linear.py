"""Products with plain or packed matrices, and embeddings. Rows of `x` are tokens: `[T, in]` to `[T, out]`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Any

import mlx.core as mx
import numpy as np

from ..kernels_cpu import Packed
from ..util.dataclass import dataclass
from .activations import Activated, Gate
from .norms import RMSNorm
from .small_batch_matmul import block_product, block_rows, gated_product, halves, quantized_product
from .weights import Blocks, Dense, Format, Matrix, Quantized, RawBlocks, Recipe, Weights, concat, map_rows


def multiply(x: mx.array, matrix: Matrix | Packed) -> mx.array:
    """Return `x @ matrix.T`, `[..., in]` to `[..., out]`."""
    if isinstance(matrix, Quantized):
        return quantized_product(x, matrix)
    if isinstance(matrix, Packed):
        return matrix.multiply(x)
    if isinstance(matrix, Dense):
        return x @ matrix.weight.T
    if isinstance(matrix, RawBlocks):
        return x @ matrix.dequantize(x.dtype).T
    return block_product(x, matrix)


@dataclass(frozen=True, slots=True)
class NamedProjection:
    """Neighbouring rows of a matrix that form one projection of the checkpoint. Adapters and conversions find projections by name."""

    name: str
    """Name in the graph, without `.weight`."""
    rows: int
    order: np.ndarray | None = None
    """int `[rows]`: index in the checkpoint of each row; None for the same order."""
    in_parts: bool = False
    """True if other rows of the matrix are elsewhere; adapters cannot change such a projection."""


class Linear:
    """A matrix `[out, in]` with an optional bias `[out]`. `nn.packing` may replace the matrix by its `Packed` form."""

    def __init__(self, matrix: Matrix | Packed, bias: mx.array | None = None, projections: tuple[NamedProjection, ...] = ()) -> None:
        self.matrix = matrix
        self.bias = bias
        self.projections = projections

    @classmethod
    def load(
        cls,
        weights: Weights,
        name: str,
        out_dims: int,
        in_dims: int,
        *,
        bias: bool = False,
        otherwise: Sequence[Recipe] = (),
        quantizable: bool = True,
    ) -> Linear:
        """Load `name.weight`, and `name.bias` if `bias`."""
        matrix = weights.matrix(f"{name}.weight", (out_dims, in_dims), otherwise=otherwise, quantizable=quantizable)
        own = (NamedProjection(name, out_dims),) if quantizable else ()
        return cls(matrix, weights.vector(f"{name}.bias", (out_dims,)) if bias else None, own)

    def __call__(self, x: mx.array, *, norm: RMSNorm | None = None, onto: mx.array | None = None) -> mx.array:
        """`[..., in]` to `[..., out]`. `norm` is applied to x first; the result is added to `onto`, if given."""
        matrix, bias = self.matrix, self.bias
        if isinstance(matrix, Quantized):
            y = quantized_product(x if norm is None else norm(x), matrix)
            y = y if bias is None else y + bias
            return y if onto is None else onto + y
        if isinstance(matrix, Packed):
            if norm is None:
                return matrix.multiply(x, bias=bias, residual=onto)
            return matrix.multiply(x, bias=bias, residual=onto, norm=norm.weight, eps=norm.eps)
        x = x if norm is None else norm(x)
        if bias is None:
            y = multiply(x, matrix)
        else:
            y = mx.addmm(bias, x, matrix.weight.T) if isinstance(matrix, Dense) else multiply(x, matrix) + bias
        return y if onto is None else onto + y

    @property
    def adds_bias_apart(self) -> bool:
        """True if a bias is added to a quantized product by another operation."""
        return type(self) is Linear and self.bias is not None and type(self.matrix) is Quantized

    def product_and_bias(self, x: mx.array) -> tuple[mx.array, mx.array | None]:
        """Return the product without the bias, and the bias `[out]`, if MLX adds them apart; otherwise their sum and None."""
        matrix, bias = self.matrix, self.bias
        if not self.adds_bias_apart or bias is None or not isinstance(matrix, Quantized):
            return self(x), None
        y = quantized_product(x, matrix)
        return (y, bias) if y.dtype == bias.dtype else (y + bias, None)

    def can_gate(self, activation: str) -> bool:
        """True if `gated` supports this activation."""
        return isinstance(self.matrix, Packed) and self.matrix.can_gate(activation)

    def gated(self, activation: str, x: mx.array, *, norm: RMSNorm | None = None) -> mx.array:
        """`activation(first half of the outputs) * second half`: `[..., in]` to `[..., out / 2]`."""
        assert isinstance(self.matrix, Packed)
        if norm is None:
            return self.matrix.multiply(x, bias=self.bias, gate=activation)
        return self.matrix.multiply(x, bias=self.bias, gate=activation, norm=norm.weight, eps=norm.eps)


class JoinedLinear:
    """Several projections of one input, computed with one product per run of neighbours stored in the same format.

    A call returns one output per projection, in the order given. Further arguments go to the products (the chosen experts).
    """

    def __init__(self, parts: Sequence[Linear], sizes: Sequence[int]) -> None:
        runs = [list(run) for _, run in groupby(zip(parts, sizes, strict=True), key=lambda part: _layout_of(part[0]))]
        self.linears = [_join_linears([linear for linear, _ in run]) for run in runs]
        self.splits = [list(accumulate(size for _, size in run))[:-1] for run in runs]

    @classmethod
    def fused(cls, linear: Linear, sizes: Sequence[int]) -> JoinedLinear:
        """Split the outputs of one stored matrix with the rows of several projections."""
        joined = cls([linear], [sum(sizes)])
        joined.splits = [list(accumulate(sizes))[:-1]]
        return joined

    @classmethod
    def apart(cls, parts: Sequence[JoinedLinear]) -> JoinedLinear:
        """Concatenate joined projections without joining their products."""
        joined = cls([], [])
        joined.linears = [linear for part in parts for linear in part.linears]
        joined.splits = [splits for part in parts for splits in part.splits]
        return joined

    def after_first(self) -> JoinedLinear:
        """Return the projections that the first product does not compute."""
        rest = JoinedLinear([], [])
        rest.linears, rest.splits = self.linears[1:], self.splits[1:]
        return rest

    def __call__(self, x: mx.array, *chosen: Any, norm: RMSNorm | None = None) -> list[mx.array]:
        outputs: list[mx.array] = []
        for y, splits in zip(self.runs(x, *chosen, norm=norm), self.splits, strict=True):
            outputs += _split_columns(y, splits)
        return outputs

    def runs(self, x: mx.array, *chosen: Any, norm: RMSNorm | None = None) -> list[mx.array]:
        """Return the products before splitting: each has the concatenated outputs of one run of projections."""
        if len(self.linears) == 1:
            linear = self.linears[0]
            return [linear(x, *chosen) if norm is None else linear(x, *chosen, norm=norm)]
        x = x if norm is None else norm(x)
        return [linear(x, *chosen) for linear in self.linears]

    def runs_and_bias(self, x: mx.array, *, norm: RMSNorm | None = None) -> tuple[list[mx.array], mx.array | None]:
        """Return `runs` without their bias, and the bias `[n]`, if it would be added to a quantized product by another operation; otherwise
        `runs` and None."""
        if len(self.linears) > 1 or not self.linears[0].adds_bias_apart:
            return self.runs(x, norm=norm), None
        y, bias = self.linears[0].product_and_bias(x if norm is None else norm(x))
        return [y], bias

    def gated(self, gate: Gate, x: mx.array, *chosen: Any, norm: RMSNorm | None = None) -> mx.array:
        """`gate(first projection, second projection)`; a packed matrix computes it within its product."""
        linear = self.linears[0]
        if len(self.linears) > 1:
            first, second = self(x, *chosen, norm=norm)
            return gate(first, second)
        if isinstance(gate, Activated):
            if linear.can_gate(gate.activation):
                return linear.gated(gate.activation, x, *chosen, norm=norm)
            if type(linear) is Linear and isinstance(linear.matrix, Quantized) and linear.bias is None:
                return gated_product(x if norm is None else norm(x), linear.matrix, gate)
            gate = gate.compute
        y = linear(x, *chosen) if norm is None else linear(x, *chosen, norm=norm)
        return gate(*_split_columns(y, self.splits[0]))


def _split_columns(y: mx.array, splits: list[int]) -> list[mx.array]:
    """Split `[..., n]` before these columns."""
    if len(splits) == 1 and 2 * splits[0] == y.shape[-1]:
        return halves(y)
    return [*mx.split(y, splits, axis=-1)] if splits else [y]


def _layout_of(linear: Linear) -> tuple[Any, ...]:
    matrix = linear.matrix
    if isinstance(matrix, Packed):
        return (id(matrix),)  # joined before it was packed
    form: Format | mx.Dtype = matrix.weight.dtype if isinstance(matrix, Dense) else matrix.format
    return form, linear.bias is not None


def _join_linears(linears: list[Linear]) -> Linear:
    if len(linears) == 1:
        return linears[0]
    matrices = [linear.matrix for linear in linears if not isinstance(linear.matrix, Packed)]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    joined = type(linears[0])(concat(matrices), mx.concatenate(biases, axis=-1) if biases else None)
    if all(linear.projections for linear in linears):
        joined.projections = tuple(each for linear in linears for each in linear.projections)
    return joined


class Embedding:
    """A table `[vocab, dims]`, gathered by token id; if the head is tied, it also serves as the output matrix."""

    def __init__(self, matrix: Matrix | Packed, dtype: mx.Dtype) -> None:
        self.matrix = matrix
        self.dtype = dtype

    def __call__(self, tokens: mx.array) -> mx.array:
        if isinstance(self.matrix, Packed):
            return self.matrix.rows(tokens, self.dtype)
        if isinstance(self.matrix, Blocks):
            return block_rows(self.matrix.weight[tokens], self.matrix.format, self.dtype)
        rows = map_rows(self.matrix, lambda table: table[tokens])
        return rows.weight.astype(self.dtype) if isinstance(rows, Dense) else rows.dequantize(self.dtype)

    def as_linear(self, x: mx.array, *, norm: RMSNorm | None = None) -> mx.array:
        """Return logits: `[..., dims]` to `[..., vocab]`. `norm` is applied to x first."""
        if norm is not None and isinstance(self.matrix, Packed):
            return self.matrix.multiply(x, norm=norm.weight, eps=norm.eps)
        return multiply(x if norm is None else norm(x), self.matrix)
