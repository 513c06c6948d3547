"""Rank 0's side: sends steps and cache operations to the other ranks, and receives the rows to sample."""

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
from .messages import MessageBuffer, Op, StepMessage, pack_pages
from .ring import Ring


class Leader:
    """Numbers steps and snapshots, and sends the messages. `send` sends bytes to all ranks and is called once per step."""

    def __init__(self, ring: Ring, send: Callable[[bytes], None], extra: int = 0, taps: int = 0) -> None:
        """`extra` counts the columns that are inputs of later ranks' blocks. `taps` counts the reads of a draft head on later ranks."""
        self.buffer = MessageBuffer()
        self._ring = ring
        self._send = send
        self._extra, self._taps = extra, taps
        self._steps = 0
        self._snapshots = 0
        self._numbers: dict[int, int] = {}
        """Numbers of the steps whose pages are still to be stored, by `id`."""

    def make_cache(self, *args: Any, **settings: Any) -> LeadingCache:
        """Return a cache; arguments as for `PagedCache`."""
        return LeadingCache(self, *args, **settings)

    def rest(self, x: mx.array, step: Step, inputs: mx.array | None, adapters: Sequence[tuple[int, int]] = ()) -> mx.array:
        """Run the other ranks' blocks (`NextStages`): report the step, send the rows, and return the requested rows in their places among
        zeros."""
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
        """Send the rows of the embedding to all ranks, as a sum to which they add zeros. For tensor parallelism."""
        assert isinstance(step, CacheStep)
        self._announce(step, x.dtype, adapters)
        return self._ring.sum(x)

    def number(self, step: CacheStep) -> int:
        """Return the number of a step whose pages are stored."""
        return self._numbers[id(step)]

    def new_snapshot(self) -> int:
        """Return the number of a new snapshot."""
        self._snapshots += 1
        return self._snapshots

    def forget(self, step: CacheStep) -> None:
        """Drop the number of a step whose pages are stored."""
        self._numbers.pop(id(step), None)

    def _announce(self, step: CacheStep, dtype: mx.Dtype, adapters: Sequence[tuple[int, int]]) -> None:
        if step.needs_commit:
            self._numbers[id(step)] = self._steps
        message = StepMessage(self._steps, dtype, step.segments, tuple(adapters))
        self._steps += 1
        self.buffer.put(Op.STEP, message.pack())
        self._send(self.buffer.take())


class LeadingCache(PagedCache):
    """Cache that reports every operation on pages and states to the other ranks."""

    def __init__(self, leader: Leader, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._leader = leader
        self._buffer = leader.buffer
        self._buffer.put(Op.START, (settings["kv_cache_tokens"], settings["chunk"]))

    def open(self, match: Match | None = None, cache_salt: str | None = "") -> int:
        slot = super().open(match, cache_salt)
        snapshot = match.snapshot if match else None
        numbers = [slot, -1, 0, 0]
        if match and snapshot:
            assert isinstance(snapshot.content, NumberedRows)
            numbers = [slot, snapshot.content.number, match.reused % PAGE, int(match.reused == snapshot.position)]
        tables = [(group.tables[slot].first, *group.tables[slot].pages) for group in self.pool.groups]
        self._buffer.put(Op.OPEN, [*numbers, *pack_pages(tables)])
        return slot

    def fork(self, slot: int) -> int:
        new = super().fork(slot)
        self._buffer.put(Op.FORK, (slot, new))
        return new

    def release(self, slot: int) -> None:
        super().release(slot)
        self._buffer.put(Op.RELEASE, (slot,))

    def verified(self, slot: int, rows: int) -> None:
        super().verified(slot, rows)
        self._buffer.put(Op.VERIFIED, (slot, rows))

    def seal(self, step: CacheStep, tokens: Any = None) -> None:
        super().seal(step, tokens)
        self._leader.forget(step)

    def _store(self, segment: Segment, step: CacheStep, places: Sequence[Places]) -> None:
        super()._store(segment, step, places)
        tables = [group.tables[segment.slot].pages[-segment.filled :] for group in self.pool.groups]
        both = [pages for pair in zip(places, tables, strict=True) for pages in pair]
        self._buffer.put(Op.STORE, [self._leader.number(step), segment.slot, *pack_pages(both)])

    def _rows(self, slot: int, count: int) -> tuple[Rows, int]:
        rows, nbytes = super()._rows(slot, count)
        number = self._leader.new_snapshot()
        self._buffer.put(Op.TAKE, (number, slot, count))
        kept = NumberedRows(rows.open, rows.states, number, SnapshotHandle())
        weakref.finalize(kept.handle, self._buffer.drop, number).atexit = False
        return kept, nbytes


class SnapshotHandle:
    """Lives as long as a snapshot; its end drops the snapshot on the other ranks."""


@dataclass(frozen=True, slots=True)
class NumberedRows(Rows):
    """A snapshot that the other ranks have, too."""

    number: int
    """Number of the snapshot in messages."""
    handle: SnapshotHandle


def read_rows(segments: Sequence[Segment]) -> list[int]:
    """Return the indexes of the rows whose results are used."""
    return [row for s in segments for row in range(s.start + s.count - s.read, s.start + s.count)]


def _with_inputs(x: mx.array, inputs: mx.array, extra: int) -> mx.array:
    """Append the inputs of later ranks' blocks to the rows, `[T, hidden + extra]`."""
    rows = mx.swapaxes(inputs, 0, 1).reshape(x.shape[0], -1)
    return mx.concatenate([x, rows[:, rows.shape[1] - extra :].astype(x.dtype)], axis=1)
