"""What the compiled module offers. Arguments are positional; the functions of this package describe and name them."""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx


class Layout(Protocol):
    """How a packed matrix `[n, k]` lies in memory; see src/matmul/layout.h."""

    n: int
    k: int
    bits: int
    group_size: int
    has_integers: bool


class Native(Protocol):
    def isa_name(self) -> str: ...

    def thread_count(self) -> int: ...

    def silu_multiply(self, gate: mx.array, up: mx.array, /) -> mx.array: ...

    def pack_plain(self, weight: mx.array, /) -> tuple[mx.array, Layout]: ...

    def pack_quantized(
        self, weight: mx.array, scales: mx.array, biases: mx.array | None, group_size: int, bits: int, mode: str, /
    ) -> tuple[mx.array, Layout]: ...

    def packed_matmul(
        self,
        x: mx.array,
        data: mx.array,
        layout: Layout,
        precision: int,
        bias: mx.array | None,
        residual: mx.array | None,
        norm: mx.array | None,
        eps: float,
        gate: int,
        experts: mx.array | None,
        /,
    ) -> mx.array: ...

    def packed_rows(self, indices: mx.array, data: mx.array, layout: Layout, dtype: mx.Dtype, /) -> mx.array: ...
