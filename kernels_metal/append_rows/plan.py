"""Plans recent rows, which are stored outside of their open page: the rows that each sequence keeps and adds in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..paged_attention.arrays import integers
from ..paged_attention.tiles import MOST_ROWS, PAGE

RECENT = 16
"""Maximum recent rows of a sequence. Each step copies them, and after `RECENT` rows the page is written: a smaller number means less
copying and more writing."""

Spans = tuple[tuple[int, int, int], ...]
"""(slot, start, stop) of each entry: rows `start` to `stop` of the slot's open page are recent rows."""


@dataclass(frozen=True, slots=True)
class NewRows:
    """Rows `start` to `start + count` of a step, for rows `at` to `at + count` of a slot's open page."""

    slot: int
    start: int
    count: int
    at: int
    """First row of the page, 0 to 63."""


@dataclass(frozen=True, slots=True)
class AppendPlan:
    """Created once per step for all layers whose recent rows have the same spans."""

    old: Spans
    new: Spans
    old_length: int
    """Length of each entry's arrays before the step; 0 without entries."""
    length: int
    """Length after the step."""
    rows: int
    entries: mx.array
    """int32 `[entries, 4]`: entry before the step, number of its rows that stay, first row of the step, number of new rows."""


def plan_append(
    old: Spans, new: Sequence[NewRows], *, rows: int, old_length: int | None = None, length: int | None = None
) -> AppendPlan | None:
    """Plan the recent rows after a step of `rows` rows that adds `new` ones. Raises ValueError for impossible rows.

    None if an entry would become longer than `length`, by default `RECENT`; then they must first be written to their pages. The arrays have
    `old_length` rows before the step and `length` after it, by default as many as the longest entry.
    """
    for each in new:
        _check(each, rows)
    before = {slot: (entry, start, stop) for entry, (slot, start, stop) in enumerate(old)}
    spans: list[tuple[int, int, int]] = []
    entries: list[tuple[int, int, int, int]] = []
    for each in new:
        entry, start, stop = before.pop(each.slot, (0, each.at, each.at))
        # After withdrawn rows, or with a new sequence in the slot, rows start before the end of the entry, or before its start.
        start = start if start <= each.at <= stop else each.at
        entries.append((entry, each.at - start, each.start, each.count))
        spans.append((each.slot, start, each.at + each.count))
    for slot, (entry, start, stop) in before.items():
        entries.append((entry, stop - start, 0, 0))
        spans.append((slot, start, stop))
    needed = longest(spans)
    if needed > (RECENT if length is None else length):
        return None
    before_it = longest(old) if old_length is None else old_length
    return AppendPlan(old, tuple(spans), before_it, needed if length is None else length, rows, integers(entries))


def longest(spans: Sequence[tuple[int, int, int]]) -> int:
    """Return the length of the longest entry."""
    return max((stop - start for _, start, stop in spans), default=0)


def _check(new: NewRows, rows: int) -> None:
    if not 1 <= new.count <= MOST_ROWS or new.start < 0 or new.start + new.count > rows:
        raise ValueError(f"rows {new.start} to {new.start + new.count} of {rows}; 1 to {MOST_ROWS} can be appended")
    if new.at < 0 or new.at + new.count > PAGE or new.slot < 0:
        raise ValueError(f"rows {new.at} to {new.at + new.count} of slot {new.slot} do not lie in a page of {PAGE}")
