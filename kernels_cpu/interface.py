"""The interface of the compiled module. Arguments are positional; the functions of this package describe and name them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np


class Layout(Protocol):
    """How a packed matrix `[n, k]` lies in memory; see src/matmul/layout.h."""

    n: int
    k: int
    bits: int
    group_size: int
    has_integers: bool


class AttentionPlan(Protocol):
    """The rows of a step and where their past is stored; see `attention_plan`."""

    full_pages: int
    first_full_pages: int


class Rotation(Protocol):
    """Cosines and sines of a step's rows; see `rotation`."""


class Blocks(Protocol):
    """Consecutive decoder blocks; see `blocks`."""


class WeightFile(Protocol):
    """A mapped file of packed matrices; see `map_weights`."""

    size: int


class Native(Protocol):
    """The compiled module `_native`."""

    packed_version: int

    def map_weights(self, descriptor: int, /) -> WeightFile: ...

    def into_huge_pages(self, file: WeightFile, start: int, /) -> int: ...

    def can_map_weights(self) -> bool: ...

    def gguf_in(self, file: WeightFile, offset: int, kind: str, shape: Sequence[int], /) -> tuple[mx.array, Layout]: ...

    def isa_name(self) -> str: ...

    def thread_count(self) -> int: ...

    def silu_multiply(self, gate: mx.array, up: mx.array, /) -> mx.array: ...

    def argmax(self, x: mx.array, /) -> mx.array: ...

    def threshold(self, logits: mx.array, top_k: mx.array, top_p: mx.array, /) -> mx.array: ...

    def rms_norm(self, x: mx.array, weight: mx.array | None, eps: float, onto: mx.array | None, /) -> mx.array: ...

    def reserve_weight_memory(self, nbytes: int, /) -> None: ...

    def release_weight_memory(self) -> None: ...

    def pack_plain(self, weight: mx.array, /) -> tuple[mx.array, Layout]: ...

    def pack_quantized(
        self, weight: mx.array, scales: mx.array, biases: mx.array | None, group_size: int, bits: int, mode: str, /
    ) -> tuple[mx.array, Layout]: ...

    def gguf_types(self) -> dict[str, tuple[int, int]]: ...

    def empty_gguf(self, kind: str, shape: Sequence[int], /) -> tuple[mx.array, Layout]: ...

    def fill_gguf(self, data: mx.array, layout: Layout, kind: str, first: int, rows: np.ndarray, /) -> bool: ...

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

    def attention_plan(self, segments: Sequence[tuple[int, int, int, int, int, list[int]]], window: int | None, /) -> AttentionPlan: ...

    def rotation(self, parts: Sequence[tuple[Sequence[float], int, int]], /) -> Rotation: ...

    def paged_attention(
        self,
        rows: Sequence[mx.array],
        sealed: Sequence[mx.array],
        open: Sequence[mx.array],
        first: Sequence[mx.array],
        bits: tuple[int, int],
        plan: AttentionPlan,
        scale: float,
        softcap: float | None,
        sinks: mx.array | None,
        query_norm: mx.array | None,
        key_norm: mx.array | None,
        eps: float,
        rotation: Rotation | None,
        /,
    ) -> list[mx.array]: ...

    Projection: Callable[[mx.array, Layout, int, mx.array | None], object]

    Norm: Callable[[mx.array | None, float], object]

    Block: Callable[..., object]

    def blocks(self, blocks: Sequence[object], /) -> Blocks: ...

    def run_blocks(
        self,
        x: mx.array,
        blocks: Blocks,
        sealed: Sequence[Sequence[mx.array]],
        open: Sequence[Sequence[mx.array]],
        first: Sequence[Sequence[mx.array]],
        bits: Sequence[tuple[int, int]],
        plans: Sequence[AttentionPlan],
        rotations: Sequence[Rotation | None],
        /,
    ) -> list[mx.array]: ...
