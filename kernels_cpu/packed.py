"""Matrices in the layout of the native products (see src/matmul/layout.h)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import mlx.core as mx
import numpy as np

from ..util.dataclass import dataclass
from .native import Layout, in_use, native

GATES = {"silu": 1, "gelu_tanh": 2}
"""Activations that a product can apply at its end, with their numbers in the native operation."""

_GATED_ROWS = 32

PRECISIONS = {"float32": 0, "int16": 1, "int8": 2}
"""Rounding of activations in products with quantized matrices. "int16" means 15 bits and "int8" 8 bits with a scale per 32 columns; with
K-quants, 16 or 8 bits with a scale per 256 columns."""


def default_precision() -> str:
    """`MLXINFER_CPU_PRECISION` if it names one of `PRECISIONS`, otherwise "int16", whose loss does not show in the logits."""
    wanted = os.environ.get("MLXINFER_CPU_PRECISION", "")
    return wanted if wanted in PRECISIONS else "int16"


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix `[n, k]`, or one per expert `[experts, n, k]`, quantized or plain, rearranged for products by `pack` or `pack_gguf`."""

    data: mx.array
    """Replaces the source arrays and has their size. Scales take 16 bits if that is lossless."""
    layout: Layout
    dtype: mx.Dtype | None
    """Dtype of the scales or of the plain matrix; if activations have another dtype, results are float32. None: any."""
    precision: str
    """One of `PRECISIONS`; always "float32" for plain matrices and 8-bit floats."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.data.shape[:-2], self.layout.n, self.layout.k)

    def multiply(
        self,
        x: mx.array,
        *,
        bias: mx.array | None = None,
        residual: mx.array | None = None,
        norm: mx.array | None = None,
        eps: float = 0.0,
        gate: str | None = None,
        experts: mx.array | None = None,
    ) -> mx.array:
        """`x @ matrix.T`, `[..., k]` to `[..., n]`.

        `norm` `[k]`: x first becomes `x / sqrt(mean(x^2) + eps) * norm`. `bias` `[n]` and `residual` `[..., n]` are added. `gate` names an
        activation of `GATES`: the result is `activation(first half) * second half`, `[..., n / 2]`; see `can_gate`.

        For a matrix per expert, `experts`, integers of any shape `[...]`, selects matrices; numbers beyond the last mean the last, and
        results of negative ones are zeros. If x has fewer rows
        than `experts` has elements, each row is used for equally many consecutive elements. The result is then `[..., n]`, and `bias` is
        `[experts, n]`. A NaN or infinity in a row of x affects only that row. Raises ValueError for shapes and dtypes that do not fit.
        """
        if gate is not None and gate not in GATES:
            raise ValueError(f"[packed_matmul] there is no gate {gate!r}, only {', '.join(GATES)}.")
        if self.dtype is not None and x.dtype != self.dtype and x.dtype in (mx.bfloat16, mx.float16):
            x = x.astype(mx.float32)
        bias, residual, norm = _cast(bias, x.dtype), _cast(residual, x.dtype), _cast(norm, x.dtype)
        number = 0 if gate is None else GATES[gate]
        precision = PRECISIONS[self.precision]
        return native.packed_matmul(x, self.data, self.layout, precision, bias, residual, norm, eps, number, experts)

    def can_gate(self, activation: str) -> bool:
        """True if `multiply` accepts this `gate`: each half must have a multiple of 16 columns."""
        return activation in GATES and self.layout.n % _GATED_ROWS == 0

    def rows(self, indices: mx.array, dtype: mx.Dtype) -> mx.array:
        """Rows of a single matrix, dequantized: integers `[...]` to `[..., k]`. Indices are clamped to the valid range."""
        return native.packed_rows(indices, self.data, self.layout, dtype)


def checked_precision(precision: str | None) -> str:
    """`precision`, or the default for None. Raises ValueError unless it is one of `PRECISIONS`."""
    precision = precision or default_precision()
    if precision not in PRECISIONS:
        raise ValueError(f"[pack] there is no precision {precision!r}, only {', '.join(PRECISIONS)}.")
    return precision


def _cast(a: mx.array | None, dtype: mx.Dtype) -> mx.array | None:
    return a if a is None or a.dtype == dtype else a.astype(dtype)


def pack(
    weight: mx.array,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    *,
    group_size: int = 0,
    bits: int = 0,
    mode: str = "affine",
    precision: str | None = None,
) -> Packed:
    """Rearrange a matrix in MLX's quantized form, or without `scales` a plain one in a floating dtype. Evaluates its arguments.

    Mode "fp8" (see `packs_float8`) has E4M3 codes in groups of any multiple of 32, whose scales are floats. `[n, k]` or `[experts, n, k]`;
    `precision` None means `default_precision()`. Raises ValueError for arrays that are not such a matrix.
    """
    precision = checked_precision(precision)
    if scales is None:
        data, layout = native.pack_plain(weight)
        return Packed(data, layout, weight.dtype, "float32")
    data, layout = native.pack_quantized(weight, scales, biases, group_size, bits, mode)
    return Packed(data, layout, scales.dtype if biases is not None else None, precision if layout.has_integers else "float32")


def packs_float8() -> bool:
    """True if `pack` takes 8-bit floats with float scales, mode "fp8"; an older module does not."""
    return in_use() and getattr(native, "packs_float8", False)


def gguf_types() -> Mapping[str, tuple[int, int]]:
    """GGUF block types that `pack_gguf` accepts, as `(bits, columns that share a scale)`. Empty if the operations are not in use."""
    return native.gguf_types() if in_use() else {}


def pack_gguf(kind: str, shape: Sequence[int], pieces: Iterable[np.ndarray], *, precision: str | None = None) -> Packed:
    """A matrix `[..., n, k]` from the blocks of a GGUF file, of a type in `gguf_types`. No number changes, and the size grows only if
    scales become whole bytes.

    `pieces` are the rows in order, uint8 `[some rows, bytes of a row]`. A piece may be discarded when the next one is requested. Raises
    ValueError for an infinite or NaN scale, and for bytes that are not such a matrix.
    """
    precision = checked_precision(precision)
    data, layout = native.empty_gguf(kind, list(shape))
    done = 0
    for piece in pieces:
        if not native.fill_gguf(data, layout, kind, done, piece):
            raise ValueError("a scale is NaN or infinite")
        done += len(piece)
    return Packed(data, layout, None, precision)


def packed_in(data: mx.array, numbers: Sequence[int], dtype: mx.Dtype | None, precision: str | None = None) -> Packed:
    """A matrix whose `data` lies elsewhere. `numbers` are `Layout.numbers`, kept by a module of the same `packed_version`; `dtype` and
    `precision` are the matrix's own and that of `pack`. Raises ValueError for numbers of no layout."""
    precision, layout = checked_precision(precision), native.layout_of(list(numbers))
    return Packed(data, layout, dtype, precision if layout.has_integers else "float32")


@contextmanager
def weight_memory(nbytes: int) -> Iterator[None]:
    """Inside the block, packed matrices take their memory from one region of `nbytes`, whose pages another thread clears meanwhile. Memory
    beyond the region is allocated as usual. 0 reserves nothing."""
    wanted = in_use() and nbytes > 0
    if wanted:
        native.reserve_weight_memory(nbytes)
    try:
        yield
    finally:
        if wanted:
            native.release_weight_memory()
