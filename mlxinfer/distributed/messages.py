"""Messages of rank 0: cache operations and steps in order, packed as small integers."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import chain

import mlx.core as mx
import numpy as np

from ..cache.base import Segment
from ..util.dataclass import dataclass

ITEM = array("i").itemsize
_SEGMENT = 10
"""Integers per segment, before its rotary positions and spans."""
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
"""Dtypes of rows; a message has the index."""
NONE = -(2**31)
"""Encodes None among page ids; ids of first pages are negative, too."""


class Op(IntEnum):
    """Operation of a message, with its operands."""

    START = 0
    """Create an empty cache: its tokens, rows per step."""
    OPEN = 1
    """Open a slot: slot, snapshot (-1 without), open rows to take from it, whether its states are used, then the pages by group."""
    FORK = 2
    """Copy a slot: source, new slot."""
    RELEASE = 3
    TAKE = 4
    """Save a slot's open page and states as a snapshot: number of the snapshot, slot, open rows."""
    DROP = 5
    VERIFIED = 6
    """Accept the first `rows` drafts of a slot: slot, rows."""
    STORE = 7
    """Store the pages that a step filled: step, slot, then for each group the places and the slot's new pages."""
    STEP = 8
    """Compute a step: number, dtype of the rows, segments, adapters of the rows."""


class MessageBuffer:
    """Collects messages until they are sent."""

    def __init__(self) -> None:
        self._numbers = array("i")
        self._dropped: list[int] = []

    def put(self, op: Op, numbers: Sequence[int]) -> None:
        self._numbers.extend((op, len(numbers)))
        self._numbers.extend(numbers)

    def drop(self, snapshot: int) -> None:
        """Report a dropped snapshot. The garbage collector may call this at any moment and in any thread."""
        self._dropped.append(snapshot)

    def take(self) -> bytes:
        """Return all messages since the last call, and clear the buffer."""
        dropped, self._dropped = self._dropped, []
        for snapshot in dropped:
            self.put(Op.DROP, (snapshot,))
        taken, self._numbers = self._numbers.tobytes(), array("i")
        return taken


def parse_messages(data: bytes) -> Iterator[tuple[Op, list[int]]]:
    """Yield the messages of `MessageBuffer.take`."""
    numbers = array("i")
    numbers.frombytes(data)
    at = 0
    while at < len(numbers):
        count = numbers[at + 1]
        yield Op(numbers[at]), numbers[at + 2 : at + 2 + count].tolist()
        at += 2 + count


@dataclass(frozen=True, slots=True)
class StepMessage:
    number: int
    """Counted from 0 for the group."""
    dtype: mx.Dtype
    """Dtype of the rows sent between ranks."""
    segments: tuple[Segment, ...]
    """Arguments of rank 0's `PagedCache.begin`."""
    adapters: tuple[tuple[int, int], ...]
    """(place in the stack, number of rows) of consecutive adapters; place 0 means no adapter. Empty if no row has one."""

    def pack(self) -> list[int]:
        segments = chain.from_iterable(map(_packed_segment, self.segments))
        return [self.number, DTYPES.index(self.dtype), len(self.segments), *segments, *chain.from_iterable(self.adapters)]

    @classmethod
    def unpack(cls, numbers: Sequence[int]) -> StepMessage:
        """Parse the integers of `pack`."""
        number, dtype, count = numbers[:3]
        at, segments = 3, []
        for _ in range(count):
            segment, at = _segment(numbers, at)
            segments.append(segment)
        rest = numbers[at:]
        return cls(number, DTYPES[dtype], tuple(segments), tuple(zip(rest[::2], rest[1::2], strict=True)))


def _packed_segment(s: Segment) -> list[int]:
    rope = [] if s.rope is None else s.rope.ravel().tolist()
    return [
        s.slot,
        s.start,
        s.count,
        s.past,
        s.total,
        s.drafts,
        s.read,
        s.shift,
        len(rope),
        len(s.spans),
        *rope,
        *chain.from_iterable(s.spans),
    ]


def _segment(numbers: Sequence[int], at: int) -> tuple[Segment, int]:
    """Parse a segment; return it with the index after it."""
    positions, spans = numbers[at + 8 : at + _SEGMENT]
    first = at + _SEGMENT
    middle, end = first + positions, first + positions + 2 * spans
    rope = np.array(numbers[first:middle], np.int32).reshape(3, -1) if positions else None
    ranges = tuple(zip(numbers[middle:end:2], numbers[middle + 1 : end : 2], strict=True))
    slot, start, count, past, total, drafts, read, shift = numbers[at : at + 8]
    return Segment(slot, start, count, past, total, drafts, read, shift, rope, ranges), end


def pack_pages(groups: Sequence[Sequence[int | None]]) -> list[int]:
    """Pack lists of page ids, each after its length."""
    return [n for pages in groups for n in (len(pages), *(NONE if page is None else page for page in pages))]


def unpack_pages(numbers: Sequence[int]) -> list[list[int | None]]:
    """Parse the integers of `pack_pages`."""
    groups: list[list[int | None]] = []
    at = 0
    while at < len(numbers):
        end = at + 1 + numbers[at]
        groups.append([None if page == NONE else page for page in numbers[at + 1 : end]])
        at = end
    return groups
