"""What rank 0 tells the others: operations on the cache and steps, as small integers in the order in which they happened."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import chain

import mlx.core as mx

from ..cache.base import Segment
from ..util.dataclass import dataclass

ITEM = array("i").itemsize
_SEGMENT = 7
"""Integers of a segment."""
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
"""Dtypes of rows; a message has the place in this list."""
NONE = -(2**31)
"""Stands for None among page ids, of which those of first pages are negative."""


class Op(IntEnum):
    """What a message asks for."""

    START = 0
    """A new, empty cache: tokens that it holds, rows of a step."""
    OPEN = 1
    """A slot begins: slot, snapshot (-1 without), open rows to take from it, whether states come with them, then its pages by group."""
    FORK = 2
    """A slot begins with what another has: that one, the new one."""
    RELEASE = 3
    """A slot ends."""
    TAKE = 4
    """Keep a slot's open page and states as a snapshot: number of the snapshot, slot, open rows."""
    DROP = 5
    """Forget a snapshot."""
    VERIFIED = 6
    """So many rows of a slot's drafts hold: slot, rows."""
    STORE = 7
    """Pages that a step has filled get their places: step, slot, then for each group the places and the slot's pages from now on."""
    STEP = 8
    """Compute a step: its number, dtype of the rows, its segments, and which adapters its rows have."""


class Journal:
    """Collects messages until they are sent."""

    def __init__(self) -> None:
        self._numbers = array("i")
        self._dropped: list[int] = []

    def put(self, op: Op, numbers: Sequence[int]) -> None:
        self._numbers.extend((op, len(numbers)))
        self._numbers.extend(numbers)

    def drop(self, snapshot: int) -> None:
        """Have a snapshot forgotten. May be called by the garbage collector, at any moment and in any thread."""
        self._dropped.append(snapshot)

    def take(self) -> bytes:
        """All messages since the last time."""
        dropped, self._dropped = self._dropped, []
        for snapshot in dropped:
            self.put(Op.DROP, (snapshot,))
        taken, self._numbers = self._numbers.tobytes(), array("i")
        return taken


def messages(data: bytes) -> Iterator[tuple[Op, list[int]]]:
    """What a journal has collected, message by message."""
    numbers = array("i")
    numbers.frombytes(data)
    at = 0
    while at < len(numbers):
        count = numbers[at + 1]
        yield Op(numbers[at]), numbers[at + 2 : at + 2 + count].tolist()
        at += 2 + count


@dataclass(frozen=True, slots=True)
class StepMessage:
    """A step to compute."""

    number: int
    """Counted from 0 since the group began."""
    dtype: mx.Dtype
    """The dtype of the rows that go from rank to rank."""
    segments: tuple[Segment, ...]
    """As rank 0's cache was given them."""
    adapters: tuple[tuple[int, int], ...]
    """Places of adapters in their stacks (0: none) and how many rows they are for, in order; empty where no row has one."""

    def pack(self) -> list[int]:
        """As integers."""
        flat = chain.from_iterable((s.slot, s.start, s.count, s.past, s.total, s.drafts, s.read) for s in self.segments)
        return [self.number, DTYPES.index(self.dtype), len(self.segments), *flat, *chain.from_iterable(self.adapters)]

    @classmethod
    def unpack(cls, numbers: Sequence[int]) -> StepMessage:
        """From what `pack` gave."""
        number, dtype, count = numbers[:3]
        end = 3 + count * _SEGMENT
        segments = tuple(Segment(*numbers[at : at + _SEGMENT]) for at in range(3, end, _SEGMENT))
        rest = numbers[end:]
        return cls(number, DTYPES[dtype], segments, tuple(zip(rest[::2], rest[1::2], strict=True)))


def pack_pages(groups: Sequence[Sequence[int | None]]) -> list[int]:
    """Lists of page ids, each with its length before it."""
    return [n for pages in groups for n in (len(pages), *(NONE if page is None else page for page in pages))]


def unpack_pages(numbers: Sequence[int]) -> list[list[int | None]]:
    """From what `pack_pages` gave."""
    groups: list[list[int | None]] = []
    at = 0
    while at < len(numbers):
        end = at + 1 + numbers[at]
        groups.append([None if page == NONE else page for page in numbers[at + 1 : end]])
        at = end
    return groups
