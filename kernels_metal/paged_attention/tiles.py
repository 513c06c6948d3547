"""Supported shapes of attention over pages, and all choices of how kernels divide the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import mlx.core as mx

from ...errors import UnsupportedShapeError
from ...util.dataclass import dataclass
from ..formats import BITS, element_bits, v_group

PAGE = 64
DIMS = range(16, 513, 8)
MOST_HEADS, MOST_ROWS = 16, 8
MOST_SIMDGROUPS = 8
"""Maximum per threadgroup: with more than 256 threads, a Mac may lack registers for kernels with as many numbers per lane."""
MOST_NUMBERS = 112
"""Maximum `live_numbers` of a lane. An Apple GPU has 128 registers of 32 bits for a thread, and 16 remain for addresses and counters. With
more, a kernel keeps numbers in memory and is slower (github.com/ml-explore/mlx/issues/4077)."""
UNDIVIDED = 4
"""Pages of a sequence that is never divided: adding up parts would take another launch."""
THREADGROUP_BYTES = 32 * 1024
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads, head sizes and formats of an attention layer."""

    dtype: mx.Dtype
    heads: int
    kv_heads: int
    key_dim: int
    """Channels of a query or key head."""
    value_dim: int
    k_bits: int
    """Bits per key; 16: stored in `dtype`."""
    v_bits: int
    """Bits per value; 16: stored in `dtype`."""

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """Template arguments of `paged_attention_decode`; its source describes them in detail."""

    queries: int
    """Queries (head and row) that a simdgroup handles."""
    key_run: int
    """Tokens of a channel of K per load of a lane."""
    value_run: int
    """Channels of a token of V per load of a lane."""
    simdgroups: int
    shared: bool
    """True if all simdgroups share each page; otherwise each reads its own pages."""
    stage: int
    """Bytes of threadgroup memory for shared pages."""
    staged_queries: int
    """Queries copied to threadgroup memory; 0: read from device memory."""


def check_shape(shape: Shape) -> None:
    """Raise `UnsupportedShapeError`, with the supported values, unless a kernel exists for this shape."""
    if shape.k_bits not in BITS or shape.v_bits not in BITS:
        raise UnsupportedShapeError(f"no attention over pages of {shape.k_bits} and {shape.v_bits} bits; there are {_enumerated(BITS)}")
    if shape.key_dim not in DIMS or shape.value_dim not in DIMS:
        raise UnsupportedShapeError(
            f"no attention over heads of {shape.key_dim} and {shape.value_dim}; there are multiples of 8 from {DIMS[0]} to {DIMS[-1]}"
        )
    if shape.heads % shape.kv_heads or not 1 <= shape.group <= MOST_HEADS:
        raise UnsupportedShapeError(
            f"no attention of {shape.heads} heads to {shape.kv_heads} KV heads; there are 1 to {MOST_HEADS} for each"
        )
    if shape.dtype not in DTYPES:
        raise UnsupportedShapeError(f"no attention in {shape.dtype}; there are float32, float16 and bfloat16")


def _enumerated(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


@cache
def row_classes(shape: Shape) -> tuple[int, ...]:
    """Return up to 3 numbers of rows with a compiled kernel.

    Metal takes up to seconds to compile a kernel, and each is tried before a model uses it. A power of two is missing if 8 simdgroups
    cannot process as many queries, or if the next kernel is almost as fast.
    """
    fitting = [rows for rows in (1, 2, 4, MOST_ROWS) if rows == 1 or decode_tile(shape, rows).simdgroups <= MOST_SIMDGROUPS]
    if len(fitting) > 3:
        fitting.remove(4 if decode_tile(shape, 4).shared else 2)
    return tuple(fitting)


def row_class(shape: Shape, rows: int) -> int:
    """Return the rows of the kernel for `rows` rows of a sequence. If it has fewer, the rows are divided among work items."""
    classes = row_classes(shape)
    return next((most for most in classes if rows <= most), classes[-1])


@cache
def decode_tile(shape: Shape, rows: int) -> DecodeTile:
    """Return the tile for `rows` rows of a sequence, one of `row_classes(shape)`, and any number of pages.

    `live_numbers` of a lane are limited; long runs leave 8 more registers for their loads. With few queries, loading dominates, and long
    runs make wide loads. With more, runs are shorter; every simdgroup still reads its own pages. More queries are divided among at most 8
    simdgroups, which share pages in threadgroup memory. Its size decides how many threadgroups share a core, so a part of a page is 4 KB if
    rows are short.
    """
    queries = shape.group * rows
    for key_run, most_run, spare in ((16, 16, 8), (16, 8, 8), (8, 8, 0), (8, 4, 0)):
        run = _value_run(shape, most_run)
        if run and queries <= 8 and live_numbers(shape, queries, key_run, run) <= MOST_NUMBERS - spare:
            tiles = (DecodeTile(queries, key_run, run, simdgroups, False, 16, 0) for simdgroups in (4, 2, 1))
            fitting = next((tile for tile in tiles if decode_memory(shape, tile) <= THREADGROUP_BYTES), None)
            if fitting:
                return _with_queries(shape, queries, fitting)
    each, run = _of_sharing_simdgroup(shape, queries)
    stage = 4096 if shape.value_dim * shape.dtype.size <= 1024 else 8192
    return _with_queries(shape, queries, DecodeTile(each, 8, run, -(-queries // each), True, stage, 0))


def _of_sharing_simdgroup(shape: Shape, queries: int) -> tuple[int, int]:
    """Return (queries of a simdgroup, channels of V per load) with shared pages: 4 queries, or 2 of wide heads; twice as many if simdgroups
    would not suffice. Long loads are better, more queries are better still."""
    runs = [run for run in (_value_run(shape, 8), _value_run(shape, 4)) if run]
    choices = [(each, run) for each in (8, 4, 2) for run in runs if live_numbers(shape, each, 8, run) <= MOST_NUMBERS]
    usual = next((choice for choice in choices if choice[0] <= 4), (2, runs[0]))
    return next((choice for choice in choices if choice[0] == 2 * usual[0] and queries > MOST_SIMDGROUPS * usual[0]), usual)


def live_numbers(shape: Shape, queries: int, key_run: int, value_run: int) -> int:
    """Return the most numbers of 32 bits that a lane holds at a time, without addresses and counters: while it multiplies keys, weighs
    tokens, or adds values. The source declares them: `State`, `multiply_channels`, `weigh`, `add_values`."""
    groups = 0 if shape.v_bits == 16 else shape.value_dim // v_group(shape.value_dim)
    state = queries * (2 + value_run * -(-shape.value_dim // value_run // 32) + groups)
    keys = state + queries * (key_run + 1 + (shape.k_bits != 16)) + _loaded(shape, shape.k_bits, key_run, 64 // key_run) + key_run
    weights = state + queries * key_run + 2 * groups
    values = state + _loaded(shape, shape.v_bits, value_run, 8) + value_run
    return max(keys, weights, values)


def _loaded(shape: Shape, bits: int, run: int, most: int) -> int:
    """Return the words of codes, or of numbers kept as they are, that a lane loads before it uses the first: at most `most` runs."""
    words = [-(-run * element_bits(each, shape.dtype) // 32) for each in (bits, 16)]
    return max(n * min(most, 16 // n if n <= 16 else 1) for n in words)


def _value_run(shape: Shape, most: int) -> int:
    """Return the channels of V per load of a lane: within a group that shares a scale, and whole bytes."""
    group = shape.value_dim if shape.v_bits == 16 else v_group(shape.value_dim)
    runs = [n for n in (16, 8, 4) if n <= most and group % n == 0 and n * element_bits(shape.v_bits, shape.dtype) % 8 == 0]
    return runs[0] if runs else 0


def _with_queries(shape: Shape, queries: int, tile: DecodeTile) -> DecodeTile:
    """Copy queries to threadgroup memory if they fit. Otherwise the kernel reads them from device memory for every page."""
    staged = replace(tile, staged_queries=queries)
    return staged if decode_memory(shape, staged) <= (THREADGROUP_BYTES if tile.shared else 3 * THREADGROUP_BYTES // 4) else tile


def decode_memory(shape: Shape, tile: DecodeTile) -> int:
    """Return the bytes of threadgroup memory, `Room` in the source; each array may start at a multiple of 16."""
    groups = 1 if shape.v_bits == 16 else shape.value_dim // v_group(shape.value_dim)
    teams = 1 if tile.shared else tile.simdgroups
    weights = max(_rows_at_once(shape, tile, bits) for bits in (shape.v_bits, 16)) * tile.queries * tile.simdgroups
    arrays = (
        4 * (tile.stage // 4 if tile.shared else 1),
        4 * (shape.key_dim if tile.shared and shape.k_bits != 16 else 1),
        4 * (1 if shape.v_bits == 16 else teams * 64 * groups),
        4 * (weights if tile.shared else max(weights, tile.simdgroups * shape.value_dim)),
        4 * (1 if tile.shared else 2 * tile.simdgroups * tile.queries),
        max(1, tile.staged_queries * shape.key_dim) * shape.dtype.size,
    )
    return sum(-(-size // 16) * 16 for size in arrays)


def _rows_at_once(shape: Shape, tile: DecodeTile, bits: int) -> int:
    if not tile.shared:
        return PAGE
    row = -(-shape.value_dim * element_bits(bits, shape.dtype) // 32) * 4
    fit = min(tile.stage // row, 8192 // (4 * tile.queries * tile.simdgroups))
    return next(n for n in (64, 32, 16, 8, 4) if fit >= n)


def pages_of_an_item(pages: Sequence[int], kv_heads: int, cores: int, *, shared: bool) -> int:
    """Return the maximum pages of a work item; `pages` has the number of pages of each sequence.

    A core runs 4 threadgroups of 4 simdgroups; with twice as many, few are idle while the last ones finish. A run has at least 8 pages,
    because each writes a float32 answer that is read again. At 8 pages of 4 bits and one row this adds a tenth to the bytes, at 64 pages an
    eightieth. If there would be fewer than 2 threadgroups per core, a run has one page per simdgroup: 4, or 2 if simdgroups share pages.
    """
    wanted = max(1, 8 * cores // kv_heads)
    few = sum(-(-n // 8) for n in pages) * kv_heads < 2 * cores
    least = (2 if shared else 4) if few else 8
    return max(least, -(-sum(pages) // wanted))
