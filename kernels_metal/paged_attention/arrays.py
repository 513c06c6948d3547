"""Inputs of attention kernels: expected shapes of the cache's arrays, and small arrays created here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import chain
from typing import cast

import mlx.core as mx

from ..formats import v_group
from .tiles import PAGE, Shape

_PADDED = 8
Expected = list[tuple[tuple[int, ...], mx.Dtype]]


def sealed_arrays(shape: Shape, pages: int) -> Expected:
    """Return shapes and dtypes of a pool of sealed pages: keys, then values."""
    return _of_keys(shape, pages) + _of_values(shape, pages)


def _of_keys(s: Shape, pages: int) -> Expected:
    of = (s.kv_heads, pages)
    if s.k_bits == 16:
        return [((*of, s.key_dim, PAGE), s.dtype)]
    return [((*of, s.key_dim, 2 * s.k_bits), mx.uint32), ((*of, 2, s.key_dim), mx.float16)]


def _of_values(s: Shape, pages: int) -> Expected:
    of = (s.kv_heads, pages)
    if s.v_bits == 16:
        return [((*of, PAGE, s.value_dim), s.dtype)]
    groups = s.value_dim // v_group(s.value_dim)
    return [((*of, PAGE, -(-s.value_dim * s.v_bits // 32)), mx.uint32), ((*of, 2, PAGE, groups), mx.float16)]


def first_arrays(shape: Shape, pages: int) -> Expected:
    """Return shapes and dtypes of the pool of first pages, at 16 bits."""
    return [((shape.kv_heads, pages, shape.key_dim, PAGE), shape.dtype), ((shape.kv_heads, pages, PAGE, shape.value_dim), shape.dtype)]


def expect(what: str, arrays: Sequence[mx.array], expected: Expected) -> None:
    """Raise ValueError unless the arrays have the expected shapes and dtypes."""
    found = [(a.shape, a.dtype) for a in arrays]
    if found != expected:
        raise ValueError(f"{what} are {_shapes_text(found)}; expected {_shapes_text(expected)}")


def expect_floats(what: str, array: mx.array, count: int) -> None:
    """Raise ValueError unless the array is `[count]` in a floating dtype."""
    if array.shape != (count,) or array.dtype not in (mx.float32, mx.float16, mx.bfloat16):
        raise ValueError(f"{what} are {array.dtype}{list(array.shape)}; expected {count} floats")


def _shapes_text(arrays: Expected) -> str:
    return " and ".join(f"{str(dtype).removeprefix('mlx.core.')}{list(shape)}" for shape, dtype in arrays) or "none"


def integers(rows: Sequence[int] | Sequence[Sequence[int]]) -> mx.array:
    """Return the numbers as int32, padded to at least 8: Metal passes smaller arrays in another address space."""
    # Every step makes some: NumPy takes twice as long for so few numbers.
    flat = [*rows] if rows and isinstance(rows[0], int) else [*chain.from_iterable(cast("Sequence[Sequence[int]]", rows))]
    return mx.array(flat + [0] * (_PADDED - len(flat)), mx.int32)


@lru_cache(256)
def cached_integers(*numbers: int) -> mx.array:
    """Return `integers`, cached for all threads."""
    return _evaluated(integers(numbers))


@cache
def settings(
    scale: float,
    softcap: float,
    has_sinks: bool,
    divided: bool = False,
    query_eps: float = -1.0,
    key_eps: float = -1.0,
    has_bias: bool = False,
    value_eps: float = -1.0,
) -> mx.array:
    """Return float32 `[8]`: scale, soft cap (0: none), 1 with sinks, 1 if answers are merged from parts, the epsilons of the norms of
    query and key heads (-1: without a norm), 1 with a bias, the epsilon of the norm of value heads.

    Evaluated, like every cached array here, because streams belong to threads, and the creating thread may have ended.
    """
    flags = float(has_sinks), float(divided)
    return _evaluated(mx.array([scale, softcap, *flags, query_eps, key_eps, float(has_bias), value_eps], mx.float32))


@cache
def nothing(dtype: mx.Dtype) -> mx.array:
    """Return a placeholder for an array that the kernel does not read. It has 4 axes, because the kernel may read a length."""
    return _evaluated(mx.zeros((1, 1, 1, 8), dtype))


def sink_logits(sinks: mx.array | None, dtype: mx.Dtype) -> mx.array:
    """Return sinks as an input of the kernel: padded to 8, because fewer would compile another variant, or a placeholder for None."""
    if sinks is None:
        return nothing(dtype)
    return sinks if sinks.size >= 8 else mx.pad(sinks, (0, 8 - sinks.size))


def _evaluated(array: mx.array) -> mx.array:
    mx.eval(array)
    return array
