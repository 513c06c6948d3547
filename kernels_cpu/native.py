"""Finds and loads the compiled module; what it offers, as types."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Protocol, cast

import mlx.core as mx
import numpy as np

from ..util.dataclass import dataclass


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

    packs_float8: bool

    instructions_version: int

    def map_weights(self, descriptor: int, /) -> WeightFile: ...

    def into_huge_pages(self, file: WeightFile, start: int, /) -> int: ...

    def can_map_weights(self) -> bool: ...

    def gguf_in(self, file: WeightFile, offset: int, kind: str, shape: Sequence[int], /) -> tuple[mx.array, Layout]: ...

    def isa_name(self) -> str: ...

    def thread_count(self) -> int: ...

    def silu_multiply(self, gate: mx.array, up: mx.array, /) -> mx.array: ...

    def argmax(self, x: mx.array, /) -> mx.array: ...

    def masked(self, x: mx.array, allowed: mx.array, /) -> mx.array: ...

    def threshold(self, logits: mx.array, top_k: mx.array, top_p: mx.array, /) -> mx.array: ...

    def rms_norm(self, x: mx.array, weight: mx.array | None, eps: float, onto: mx.array | None, /) -> mx.array: ...

    def fit_affine(
        self,
        weight: np.ndarray,
        importance: np.ndarray,
        bits: int,
        stored: int,
        codes: np.ndarray,
        scales: np.ndarray,
        biases: np.ndarray,
        /,
    ) -> None: ...

    def feed_back(
        self,
        plain: np.ndarray,
        target: np.ndarray,
        factor: np.ndarray,
        scales: np.ndarray,
        biases: np.ndarray,
        group_of: np.ndarray,
        bits: int,
        codes: np.ndarray,
        errors: np.ndarray,
        /,
    ) -> None: ...

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

    View: Callable[[int, int, int, int, int, int], object]

    Projection: Callable[[mx.array, Layout, int, mx.array | None], object]

    Norm: Callable[[mx.array | None, float, bool], object]

    Multiply: Callable[..., object]

    NormView: Callable[..., object]

    Attend: Callable[..., object]

    ChooseExperts: Callable[..., object]

    AddRows: Callable[..., object]

    GateView: Callable[..., object]

    Delta: Callable[..., object]

    Mamba: Callable[..., object]

    ShortConvolution: Callable[..., object]

    GatedNorm: Callable[..., object]

    def stretches(self, rows: Sequence[tuple[int, int]], /) -> object: ...

    def blocks(self, instructions: Sequence[object], hidden: int, given: int, dtype: mx.Dtype, /) -> Blocks: ...

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
        states: Sequence[mx.array],
        stretches: object | None,
        given: mx.array | None,
        /,
    ) -> list[mx.array]: ...


INSTRUCTIONS_VERSION = 2
"""That of the instructions for blocks, as in src/blocks/bindings.cpp: a module of another version is given none."""

BUILD_NOTE = "_native.json"
"""Written by setup.py next to the module: `{"mlx": version}`, or `{"failed": reason}`."""

_COST = "matrices and attention then run on MLX's own CPU operations, some thirty times slower"
_REBUILD = "pip install --force-reinstall --no-deps --no-cache-dir mlxinfer"


@dataclass(frozen=True, slots=True)
class _Native:
    module: Native | None
    problem: str | None = None


@cache
def _native() -> _Native:
    problem = _unfit()
    if problem is not None:
        return _Native(None, problem)
    try:
        import mlx.core  # brings libmlx, which the module refers to

        module = cast("Native", importlib.import_module("._native", __package__))
        module.silu_multiply(mlx.core.zeros((0,)), mlx.core.zeros((0,)))
    except ImportError as error:
        return _Native(None, f"the native module does not load ({error}); rebuild it: {_REBUILD}")
    except TypeError:
        return _Native(None, f"the native module was built with another nanobind than MLX; rebuild it: {_REBUILD}")
    return _Native(module)


def _unfit() -> str | None:
    """Why the module must not be loaded, None if it may: built for another version of MLX, it could crash the process."""
    if os.environ.get("MLXINFER_CPU_KERNELS") == "0":
        return "switched off by MLXINFER_CPU_KERNELS=0"
    try:
        note = json.loads((Path(__file__).parent / BUILD_NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "not built (on Linux pip install does so where a C++ compiler is present)"
    if "failed" in note:
        return f"not built: {note['failed']}"
    import mlx.core as mx

    installed = getattr(mx, "__version__", "unknown")  # importlib.metadata says the same, and is slow to import
    if note.get("mlx") != installed:
        return f"built for mlx {note.get('mlx')}, but {installed} is installed; rebuild it: {_REBUILD}"
    return None


def available() -> bool:
    """Whether the operations of this package can be called."""
    return _native().module is not None


def in_use() -> bool:
    """Whether the operations can be called and MLX computes on the CPU."""
    if not available():
        return False
    import mlx.core as mx

    return mx.default_device().type == mx.DeviceType.cpu


def status() -> str:
    """One line for the user: what is in use, or why it is not and what that costs."""
    found = _native()
    if found.module is None:
        return f"CPU kernels: {found.problem}; {_COST}"
    return f"CPU kernels: {isa_name()}, {_plural(thread_count(), 'thread')}{_ignored_setting()}{_age()}"


def isa_name() -> str:
    """The instruction set in use: "avx512", "avx2", "i8mm", "dotprod" or "portable"."""
    return native().isa_name()


def thread_count() -> int:
    """Threads that compute: `MLXINFER_THREADS`, or the number of CPUs that the process may use."""
    return native().thread_count()


@cache
def native() -> Native:
    """The compiled module. Raises RuntimeError with `status()` if it is missing."""
    found = _native()
    if found.module is None:
        raise RuntimeError(status())
    return found.module


def _age() -> str:
    """An older module goes on to serve, without the operations that it does not have."""
    costs = []
    if getattr(_native().module, "instructions_version", 0) != INSTRUCTIONS_VERSION:
        costs.append("blocks run operation by operation, which is slower")
    if not getattr(_native().module, "packs_float8", False):
        costs.append("8-bit floats with float scales are unpacked, to four times their size")
    return f"; the module is older than this version, and {', and '.join(costs)}; rebuild it: {_REBUILD}" if costs else ""


def _ignored_setting() -> str:
    wanted = os.environ.get("MLXINFER_THREADS")
    if wanted is None or (wanted.strip().isascii() and wanted.strip().isdigit() and 1 <= int(wanted) <= 256):
        return ""
    return f" (MLXINFER_THREADS={wanted!r} is not a number from 1 to 256 and is ignored)"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
