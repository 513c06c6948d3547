"""Rank 0's side: its cache and its model tell the other ranks what they do, and get back the rows that are sampled."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ..cache.base import PAGE, Segment, Step
from ..cache.paged import PagedCache
from ..cache.pool import Places
from ..cache.prefix_match import Match
from ..cache.state import Rows
from ..cache.step import CacheStep
from ..util.dataclass import dataclass
from .messages import Journal, Op, StepMessage, pack_pages
from .ring import Ring


class Lead:
    """What rank 0 tells the others. `send` gives bytes to all of them; it is called once per step."""

    def __init__(self, ring: Ring, send: Callable[[bytes], None], extra: int = 0, taps: int = 0) -> None:
        """`extra`: columns of a row that are the inputs of later ranks' blocks. `taps`: how often a head reads the rows between these."""
        self.journal = Journal()
        self._ring = ring
        self._send = send
        self._extra, self._taps = extra, taps
        self._steps = 0
        self._snapshots = 0
        self._numbers: dict[int, int] = {}
        """Numbers of the steps whose pages are still to be stored, by their identity."""

    def make_cache(self, *args: Any, **settings: Any) -> LeadingCache:
        """As `PagedCache`."""
        return LeadingCache(self, *args, **settings)

    def rest(self, x: mx.array, step: Step, inputs: mx.array | None, adapters: Sequence[tuple[int, int]] = ()) -> mx.array:
        """Run the other ranks' blocks (`NextStages`): report the step, send the rows, and return the requested rows in
        their places among zeros."""
        assert isinstance(step, CacheStep)
        self._announce(step, x.dtype, adapters)
        step.sent.append(self._ring.send(x if inputs is None else _with_inputs(x, inputs, self._extra)))
        read = read_rows(step.segments)
        if not read:
            return x
        width = x.shape[1] * (1 + self._taps)
        back = self._ring.receive((len(read), width), x.dtype)
        return back if len(read) == x.shape[0] else mx.zeros((x.shape[0], width), x.dtype).at[mx.array(read)].add(back)

    def spread(self, x: mx.array, step: Step, inputs: mx.array | None, adapters: Sequence[tuple[int, int]] = ()) -> mx.array:
        """The rows from the embedding, for all ranks, where each has a share of every block: a sum to which others add zeros."""
        assert isinstance(step, CacheStep)
        self._announce(step, x.dtype, adapters)
        return self._ring.sum(x)

    def number(self, step: CacheStep) -> int:
        """The number of a step whose pages are stored."""
        return self._numbers[id(step)]

    def new_snapshot(self) -> int:
        """The number of a new snapshot."""
        self._snapshots += 1
        return self._snapshots

    def forget(self, step: CacheStep) -> None:
        """Its pages are stored."""
        self._numbers.pop(id(step), None)

    def _announce(self, step: CacheStep, dtype: mx.Dtype, adapters: Sequence[tuple[int, int]]) -> None:
        if step.needs_commit:
            self._numbers[id(step)] = self._steps
        message = StepMessage(self._steps, dtype, step.segments, tuple(adapters))
        self._steps += 1
        self.journal.put(Op.STEP, message.pack())
        self._send(self.journal.take())


class LeadingCache(PagedCache):
    """A cache that tells other ranks of every operation on pages and states."""

    def __init__(self, lead: Lead, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._lead = lead
        self._journal = lead.journal
        self._journal.put(Op.START, (settings["kv_cache_tokens"], settings["chunk"]))

    def open(self, match: Match | None = None, cache_salt: str | None = "") -> int:
        slot = super().open(match, cache_salt)
        snapshot = match.snapshot if match else None
        numbers = [slot, -1, 0, 0]
        if match and snapshot:
            assert isinstance(snapshot.content, NumberedRows)
            numbers = [slot, snapshot.content.number, match.reused % PAGE, int(match.reused == snapshot.position)]
        tables = [(group.tables[slot].first, *group.tables[slot].pages) for group in self.pool.groups]
        self._journal.put(Op.OPEN, [*numbers, *pack_pages(tables)])
        return slot

    def fork(self, slot: int) -> int:
        new = super().fork(slot)
        self._journal.put(Op.FORK, (slot, new))
        return new

    def release(self, slot: int) -> None:
        super().release(slot)
        self._journal.put(Op.RELEASE, (slot,))

    def verified(self, slot: int, rows: int) -> None:
        super().verified(slot, rows)
        self._journal.put(Op.VERIFIED, (slot, rows))

    def seal(self, step: CacheStep, tokens: Any = None) -> None:
        super().seal(step, tokens)
        self._lead.forget(step)

    def _store(self, segment: Segment, step: CacheStep, places: Sequence[Places]) -> None:
        super()._store(segment, step, places)
        tables = [group.tables[segment.slot].pages[-segment.filled :] for group in self.pool.groups]
        both = [pages for pair in zip(places, tables, strict=True) for pages in pair]
        self._journal.put(Op.STORE, [self._lead.number(step), segment.slot, *pack_pages(both)])

    def _rows(self, slot: int, count: int) -> tuple[Rows, int]:
        rows, nbytes = super()._rows(slot, count)
        number = self._lead.new_snapshot()
        self._journal.put(Op.TAKE, (number, slot, count))
        kept = NumberedRows(rows.open, rows.states, number, Ticket())
        weakref.finalize(kept.ticket, self._journal.drop, number).atexit = False
        return kept, nbytes


class Ticket:
    """Lives as long as a snapshot."""


@dataclass(frozen=True, slots=True)
class NumberedRows(Rows):
    """A snapshot that other ranks have too."""

    number: int
    """What they know it by."""
    ticket: Ticket
    """They drop theirs when it is gone."""


def read_rows(segments: Sequence[Segment]) -> list[int]:
    """The rows of a step that are read."""
    return [row for s in segments for row in range(s.start + s.count - s.read, s.start + s.count)]


def _with_inputs(x: mx.array, inputs: mx.array, extra: int) -> mx.array:
    """Rows with the inputs of later ranks' blocks after them, `[T, hidden + extra]`."""
    rows = mx.swapaxes(inputs, 0, 1).reshape(x.shape[0], -1)
    return mx.concatenate([x, rows[:, rows.shape[1] - extra :].astype(x.dtype)], axis=1)
