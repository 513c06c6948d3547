"""Shapes that attention over pages supports, and how its kernels divide the work: every such choice is made here."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from ...errors import UnsupportedShapeError
from ..formats import BITS, element_bits, v_group

PAGE = 64
DIMS = range(16, 513, 8)
MOST_HEADS, MOST_ROWS = 16, 8
THREADGROUP_BYTES = 32 * 1024
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads, head sizes and formats of an attention layer."""

    dtype: mx.Dtype
    """The compute dtype."""
    heads: int
    """Query heads."""
    kv_heads: int
    """KV heads."""
    key_dim: int
    """Channels of a query or key head."""
    value_dim: int
    """Channels of a value head."""
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
    """Tokens of a channel of K that a lane reads at once."""
    value_run: int
    """Channels of a token of V that a lane reads at once."""
    simdgroups: int
    """Simdgroups per threadgroup."""
    shared: bool
    """Whether all simdgroups share each page, instead of reading pages of their own."""
    stage: int
    """Bytes of threadgroup memory through which shared pages go."""
    staged_queries: int
    """Queries copied to threadgroup memory; 0: read from device memory."""


def check_shape(shape: Shape) -> None:
    """Raise `UnsupportedShapeError`, with a list of what is supported, if there is no kernel for this shape."""
    if shape.k_bits not in BITS or shape.v_bits not in BITS:
        raise UnsupportedShapeError(f"no attention over pages of {shape.k_bits} and {shape.v_bits} bits; there are {_list(BITS)}")
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


def _list(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


def decode_tile(shape: Shape, rows: int, pages: int) -> DecodeTile:
    """The tile for up to `rows` rows of a sequence and `pages` pages in a work item.

    The limit is how many numbers a lane holds: per query, `key_run` products, the lane's channels of the answer, and a bias of V for each
    group of channels. With few queries, loading dominates, and long runs make wide loads; with more, runs are shorter, and up to 8 queries
    fit. Every simdgroup then reads pages of its own. More queries are divided among at most 16 simdgroups, and pages go through threadgroup
    memory; its size decides how many threadgroups share a core, so a part of a page is 4 KB if rows are short.
    """
    queries = shape.group * rows
    for key_run, most_run, most_numbers in ((16, 16, 64), (16, 8, 64), (8, 8, 112), (8, 4, 112)):
        run = _value_run(shape, most_run)
        if run and queries <= 8 and queries * _numbers(shape, key_run, run) <= most_numbers:
            simdgroups = 4 if pages > 2 else max(1, pages)
            return _with_queries(shape, queries, DecodeTile(queries, key_run, run, simdgroups, False, 16, queries))
    run = _value_run(shape, 8)
    each = 4 if 4 * _numbers(shape, 8, run) <= 112 else 2
    while queries > 16 * each:
        each *= 2
    stage = 4096 if shape.value_dim * shape.dtype.size <= 1024 else 8192
    return _with_queries(shape, queries, DecodeTile(each, 8, run, -(-queries // each), True, stage, queries))


def _numbers(shape: Shape, key_run: int, value_run: int) -> int:
    """Numbers that a lane holds per query."""
    groups = 0 if shape.v_bits == 16 else shape.value_dim // v_group(shape.value_dim)
    return key_run + value_run * -(-shape.value_dim // value_run // 32) + groups


def _value_run(shape: Shape, most: int) -> int:
    """Channels of V that a lane reads at once: within a group that shares a scale, and whole bytes."""
    group = shape.value_dim if shape.v_bits == 16 else v_group(shape.value_dim)
    runs = [n for n in (16, 8, 4) if n <= most and group % n == 0 and n * element_bits(shape.v_bits, shape.dtype) % 8 == 0]
    return runs[0] if runs else 0


def _with_queries(shape: Shape, queries: int, tile: DecodeTile) -> DecodeTile:
    """Queries are copied to threadgroup memory if they fit; otherwise they are read from device memory for every page."""
    rest = decode_memory(shape, tile) - tile.staged_queries * shape.key_dim * shape.dtype.size
    most = THREADGROUP_BYTES if tile.shared else 3 * THREADGROUP_BYTES // 4
    if rest + queries * shape.key_dim * shape.dtype.size <= most:
        return tile
    return DecodeTile(tile.queries, tile.key_run, tile.value_run, tile.simdgroups, tile.shared, tile.stage, 0)


def decode_memory(shape: Shape, tile: DecodeTile) -> int:
    """Bytes of threadgroup memory: `Room` in the source."""
    groups = 1 if shape.v_bits == 16 else shape.value_dim // v_group(shape.value_dim)
    teams = 1 if tile.shared else tile.simdgroups
    weights = max(_rows_at_once(shape, tile, bits) for bits in (shape.v_bits, 16)) * tile.queries * tile.simdgroups
    if not tile.shared:
        weights = max(weights, tile.simdgroups * shape.value_dim) + 2 * tile.simdgroups * tile.queries
    words = (
        (tile.stage // 4 if tile.shared else 1)
        + (shape.key_dim if tile.shared and shape.k_bits != 16 else 1)
        + (1 if shape.v_bits == 16 else teams * 64 * groups)
        + weights
    )
    return 4 * words + max(1, tile.staged_queries * shape.key_dim) * shape.dtype.size


def _rows_at_once(shape: Shape, tile: DecodeTile, bits: int) -> int:
    if not tile.shared:
        return PAGE
    row = -(-shape.value_dim * element_bits(bits, shape.dtype) // 32) * 4
    fit = min(tile.stage // row, 8192 // (4 * tile.queries * tile.simdgroups))
    return next(n for n in (64, 32, 16, 8, 4) if fit >= n)


def pages_of_an_item(pages: int, kv_heads: int, cores: int) -> int:
    """Pages per work item, given the `pages` of all sequences together.

    A core holds 4 threadgroups of 4 simdgroups; with twice as many, little is idle while the last ones finish. A run has at least 8 pages,
    because each one writes a float32 answer that has to be read again: at 8 pages of 4 bits and one row, this adds a tenth to the bytes; at
    64 pages, an eightieth.
    """
    wanted = max(1, 8 * cores // kv_heads)
    return max(8, -(-pages // wanted))
