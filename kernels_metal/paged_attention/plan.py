"""Plans decode attention in one step: validates rows and divides them into work items before anything is submitted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import mlx.core as mx

from ...util.dataclass import dataclass
from ..executors import gpu_cores
from .arrays import integers
from .tiles import MOST_ROWS, PAGE, UNDIVIDED, DecodeTile, Shape, check_shape, decode_tile, pages_of_an_item, row_class

_NO_EDGE = -(2**30)


@dataclass(frozen=True, slots=True)
class SegmentRows:
    """Rows of one sequence in a step: rows `start` to `start + count` of the queries are its tokens `past` to `past + count`.

    For decode, they are in one page, the open one.
    """

    slot: int
    """Slot of the sequence, which is the index of its open page."""
    start: int
    count: int
    past: int
    """Number of earlier tokens."""
    pages: Sequence[int]
    """Ids of the sealed pages before the open one: p >= 0 in the pool, ~p in the pool of first pages."""
    first: int = 0
    """Number of the first page in `pages`; earlier pages have left the window."""
    kept: int = PAGE
    """Rows of the open page that decode reads there; later ones are recent rows, stored elsewhere."""
    recent: int = 0
    """Entry of the recent rows."""


@dataclass(frozen=True, slots=True)
class Pools:
    """Sizes of the pools, for checking ids."""

    pages: int
    first_pages: int
    slots: int
    entries: int = 0
    """Sequences with recent rows, which are stored outside of their open page."""
    recent: int = 0
    """Recent rows per entry."""


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Created once per step for all layers with the same shape, window and page ids."""

    shape: Shape
    sequences: tuple[SegmentRows, ...]
    """The planned rows, in the order of the answers."""
    window: int | None
    """Tokens that a query attends to; None: all."""
    pools: Pools
    """Pool sizes that ids were checked against."""
    tile: DecodeTile
    query_rows: int
    """Rows of q."""
    rows: int
    """Rows of the result."""
    items: int
    part_rows: int
    """Rows that all work items write together."""
    work: mx.array
    """int32 `[items, 11]`: slot, start, count, past, oldest token seen, first page, end page, offset in `table`, first row written, rows of
    the open page read there, entry of the recent rows. An item has some of a sequence's pages, and all of its rows, or some if one
    kernel does not support their number."""
    table: mx.array
    """int32: page ids of all sequences."""
    parts: mx.array | None
    """int32 `[rows, 3]`: first part, number of parts and their distance in rows; None if no sequence is divided."""
    appends: bool
    """True if the kernel can also compute the step's own rows: the queries fit, and one work item has all rows that need a sequence's open
    page."""


def plan_decode(
    shape: Shape,
    rows: Sequence[SegmentRows],
    pools: Pools,
    *,
    query_rows: int,
    window: int | None = None,
    cores: int | None = None,
    rounded: bool = False,
) -> DecodePlan:
    """Validate the rows and divide the work. Raises `UnsupportedShapeError` for shapes without a kernel, and ValueError for impossible rows
    or page ids.

    `cores` defaults to the GPU's. With `rounded`, arrays are padded to sizes that many steps share, with items that do nothing.
    """
    check_shape(shape)
    if not rows:
        raise ValueError("no rows to attend with")
    if window is not None and window < 1:
        raise ValueError(f"a window of {window} tokens sees nothing")
    for sequence in rows:
        _check_few(sequence, pools)
        check_rows(sequence, pools, query_rows, window)
    most = row_class(shape, max(r.count for r in rows))
    tile = decode_tile(shape, most)
    pieces = list(_pieces(rows, most))
    spans = [(_first_seen(r, window), r.past // PAGE + 1) for r, _ in pieces]
    size = pages_of_an_item([end - begin for begin, end in spans], shape.kv_heads, cores or gpu_cores(), shared=tile.shared)
    cuts = [list(_cut(begin, end, max(size, UNDIVIDED) if end - begin <= UNDIVIDED else size)) for begin, end in spans]
    divided = any(len(c) > 1 for c in cuts)
    work, parts, written = _items(pieces, cuts, window)
    table = [page for r in rows for page in r.pages]
    if rounded:
        table += [0] * (round_up(len(table)) - len(table))
        if divided:
            idle = round_up(len(work), least=2) - len(work)  # each writes an empty part
            work += [_idle(written + i) for i in range(idle)]
            written += idle
    return DecodePlan(
        shape,
        tuple(rows),
        window,
        pools,
        tile,
        query_rows,
        sum(r.count for r in rows),
        len(work),
        written,
        integers(work),
        integers(table),
        integers(parts) if divided else None,
        tile.staged_queries > 0 and len(pieces) == len(rows),
    )


def round_up(count: int, least: int = 8) -> int:
    """Round up to 8, 12, 16, 24, 32, 48, 64, and so on; `least` is another power of two for the start."""
    size = least
    while size < count:
        size += max(size // 2, 1) if size & (size - 1) == 0 else size // 3
    return size


def _idle(out: int) -> tuple[int, ...]:
    """Return a work item without pages, which appends nothing. Its empty answer goes to an unused part."""
    return 0, 0, 1, PAGE, _NO_EDGE, 0, 0, 0, out, 0, 0


def _pieces(rows: Sequence[SegmentRows], most: int) -> Iterator[tuple[SegmentRows, int]]:
    """Yield the rows of each sequence in pieces of at most `most`, with the index in the table of its page 0."""
    table = 0
    for r in rows:
        if r.count <= most:
            yield r, table - r.first
        for i in range(0, r.count if r.count > most else 0, most):
            yield replace(r, start=r.start + i, count=min(most, r.count - i), past=r.past + i), table - r.first
        table += len(r.pages)


def _items(
    pieces: Sequence[tuple[SegmentRows, int]], cuts: Sequence[Sequence[tuple[int, int]]], window: int | None
) -> tuple[list[tuple[int, ...]], list[tuple[int, int, int]], int]:
    """Return `DecodePlan.work`, `DecodePlan.parts`, and the number of rows that all items write."""
    work: list[tuple[int, ...]] = []
    parts: list[tuple[int, int, int]] = []
    out = 0
    for (r, table), items in zip(pieces, cuts, strict=True):
        parts += [(out + i, len(items), r.count) for i in range(r.count)]
        oldest = _NO_EDGE if window is None else r.past - window + 1
        for begin, end in items:
            work.append((r.slot, r.start, r.count, r.past, oldest, begin, end, table, out, r.kept, r.recent))
            out += r.count
    return work, parts, out


def check_rows(r: SegmentRows, pools: Pools, query_rows: int, window: int | None) -> None:
    """Raise ValueError for rows that no kernel can process."""
    if r.count < 0 or r.start < 0 or r.start + r.count > query_rows:
        raise ValueError(f"rows {r.start} to {r.start + r.count} of {query_rows} queries")
    if not 0 <= r.slot < pools.slots:
        raise ValueError(f"slot {r.slot} of {pools.slots}")
    if r.first < 0 or r.past < 0 or r.first + len(r.pages) != r.past // PAGE:
        raise ValueError(
            f"{r.past} tokens have {r.past // PAGE} sealed pages; page ids were given for {len(r.pages)} from page {r.first} on"
        )
    if r.first > _first_seen(r, window):
        raise ValueError(f"page {_first_seen(r, window)} is within the window, but the page ids begin at page {r.first}")
    wrong = [p for p in r.pages if not -pools.first_pages <= p < pools.pages]
    if wrong:
        raise ValueError(f"page id {wrong[0]} with {pools.pages} sealed and {pools.first_pages} first pages")


def _check_few(r: SegmentRows, pools: Pools) -> None:
    if not 1 <= r.count <= MOST_ROWS:
        raise ValueError(f"{r.count} rows of a sequence; decode attention takes 1 to {MOST_ROWS}")
    if r.past < 0 or (r.past + r.count - 1) // PAGE != r.past // PAGE:
        raise ValueError(f"tokens {r.past} to {r.past + r.count} do not lie in one page of {PAGE}")
    apart = r.past % PAGE + r.count - r.kept
    if r.kept < 0 or (apart > 0 and not (0 <= r.recent < pools.entries and apart <= pools.recent)):
        there = f"{pools.entries}, of {pools.recent} rows each"
        raise ValueError(f"{apart} rows after {r.kept} kept ones are not in entry {r.recent} of {there}")


def _first_seen(r: SegmentRows, window: int | None) -> int:
    """Return the first page with a token that the first row attends to."""
    return 0 if window is None else max(0, r.past - window + 1) // PAGE


def _cut(begin: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield runs of at most `size` pages whose lengths differ by at most one."""
    pages = end - begin
    number = -(-pages // size)
    for i in range(number):
        yield begin + i * pages // number, begin + (i + 1) * pages // number
