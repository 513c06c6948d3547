"""Plans prefill attention in one step: tiles and page table, validated and created before anything is submitted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..paged_attention.arrays import integers
from ..paged_attention.plan import Pools, SegmentRows, check_rows
from ..paged_attention.tiles import PAGE, Shape, check_shape
from .tiles import PrefillTile, prefill_tile

RAW = -(2**31)
"""Id of a page that is read raw, from the open page and the step's own rows."""
_ALL = 2**30
"""Means "no window"."""


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Created once per step for all layers with the same shape, window and page ids. Answers are in the order of the planned
    `SegmentRows`."""

    shape: Shape
    tile: PrefillTile
    pools: Pools
    """Pool sizes that ids were checked against."""
    query_rows: int
    """Rows of q."""
    rows: int
    """Rows of the result."""
    filled: int
    """Pages that the step seals before it attends, sequence by sequence."""
    count: int
    tiles: mx.array
    """int32 `[count, 8]`: the kernel's `Tile`."""
    table: mx.array
    """int32: page ids of all sequences."""


def plan_prefill(
    shape: Shape, rows: Sequence[SegmentRows], pools: Pools, *, query_rows: int, window: int | None = None, first16: bool = False
) -> PrefillPlan:
    """Plan as `plan_decode` does, with any number of rows over any number of pages.

    Rows after a page that the step fills read it sealed: its id follows the ids of the pool, which means the arrays `filled`. At 16 bits,
    and for first pages in their own pool (`first16`), sealing changes nothing, and they are read raw. Raises `UnsupportedShapeError` for
    shapes without a kernel, and ValueError for impossible rows or page ids.
    """
    check_shape(shape)
    if window is not None and window < 1:
        raise ValueError(f"a window of {window} tokens sees nothing")
    for sequence in rows:
        check_rows(sequence, pools, query_rows, window)
    size = prefill_tile(shape)
    raw = shape.k_bits == shape.v_bits == 16
    tiles: list[tuple[int, ...]] = []
    table: list[int] = []
    answers = filled = 0
    fresh = max(pools.pages, 1)  # an array of one page stands for a pool that has none
    for r in rows:
        tiles += _cut(r, size.rows, len(table) - r.first, answers, window or _ALL)
        pages = (r.past + r.count) // PAGE - r.past // PAGE
        sealed = 0 if raw else pages - int(first16 and r.past < PAGE and pages > 0)
        table += [*r.pages, *[RAW] * (pages - sealed), *range(fresh + filled, fresh + filled + sealed)]
        filled += sealed
        answers += r.count
    return PrefillPlan(shape, size, pools, query_rows, answers, filled, len(tiles), integers(tiles), integers(table))


def _cut(r: SegmentRows, size: int, table: int, answers: int, window: int) -> Iterator[tuple[int, ...]]:
    """Yield tiles of at most `size` rows, none across the end of a page."""
    done = 0
    while done < r.count:
        position = r.past + done
        count = min(size, r.count - done, PAGE - position % PAGE)
        yield (r.start + done, count, position, r.past, r.slot, table, answers + done, window)
        done += count
