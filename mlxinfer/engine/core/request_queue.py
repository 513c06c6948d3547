"""The waiting list: bounded, ordered by priority, fair between clients, first come first served within a client."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import field
from typing import TYPE_CHECKING

from ...errors import QueueFullError
from ...util.dataclass import dataclass

if TYPE_CHECKING:
    from .sequence import Sequence


class VirtualTokenCounter:
    """Tokens computed for each client, in prompts and answers, on a common scale.

    A client that joins starts at the count of the least served active client, or at its own earlier count if that is higher. Absence earns
    no credit, and leaving briefly pays no debt. These are the start tags of start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996),
    in tokens as in the virtual token counter (Sheng et al., OSDI 2024).
    """

    def __init__(self) -> None:
        self.served: dict[str, float] = {}
        """Tokens by client. The scheduler adds those that it schedules."""
        self._active: dict[str, int] = {}
        self._least: list[tuple[float, str]] = []
        self._floor = 0.0

    def of(self, client: str) -> float:
        return self.served.get(client, 0.0)

    def join(self, client: str) -> None:
        """Note one more waiting or running sequence of this client."""
        count = self._active.get(client, 0)
        if not count and self._active:
            self._floor = max(self._floor, self._least_active())
        self._active[client] = count + 1
        if count:
            return
        served = self.served[client] = max(self.served.get(client, 0.0), self._floor)
        heapq.heappush(self._least, (served, client))

    def leave(self, client: str) -> None:
        """Note that one of its sequences ended. Leaving more often than joining is harmless."""
        count = self._active.get(client, 0)
        if count > 1:
            self._active[client] = count - 1
        elif count:
            del self._active[client]
            self._forget()

    def _least_active(self) -> float:
        """The least count. Entries of the heap may be too low, but never too high, so the first correct one is the least."""
        while self._least:
            served, client = self._least[0]
            if client not in self._active or client not in self.served:
                heapq.heappop(self._least)
            elif served < self.served[client]:
                heapq.heapreplace(self._least, (self.served[client], client))
            else:
                return served
        return self._floor

    def _forget(self) -> None:
        """Drop all counts if no client is active, otherwise those of absent clients that a new start would place no lower."""
        if not self._active:
            self.served.clear()
            self._least.clear()
            self._floor = 0.0
        elif len(self.served) > 2 * len(self._active) + 64:
            self._floor = max(self._floor, self._least_active())
            away = sorted((served, client) for client, served in self.served.items() if client not in self._active)
            # At least half of them go, so that names of clients never pile up.
            for place, (served, client) in enumerate(away):
                if served <= self._floor or place < len(away) // 2:
                    del self.served[client]
            self._least = [(self.served[client], client) for client in self._active]
            heapq.heapify(self._least)


Key = tuple[int, int, float, int]
"""(priority, 0 for preempted sequences and 1 for new ones, tokens of the client, arrival)."""


@dataclass(slots=True)
class _Line:
    """Sequences of one priority in order of arrival: new ones of one client, or all preempted ones."""

    priority: int
    client: str | None
    members: OrderedDict[Sequence, None] = field(default_factory=OrderedDict)
    entered: Key | None = None
    """Its key in the heap of lines."""


class RequestQueue:
    """Order: `priority`, lower first; then sequences that ran already, by arrival; then the least served client; then arrival.

    Adding, taking and removing cost the logarithm of the number of clients. A key only grows while its line waits, because clients are
    served meanwhile. An outdated key is therefore found and corrected when it reaches the top.
    """

    def __init__(self, max_waiting: int, service: VirtualTokenCounter | None = None) -> None:
        self.max_waiting = max_waiting
        self.service = service or VirtualTokenCounter()
        self._lines: dict[tuple[int, str | None], _Line] = {}
        self._heap: list[tuple[Key, int, _Line]] = []
        self.sequences: dict[Sequence, _Line] = {}
        """Waiting sequences, each with its line. Read-only for others."""
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._ticket = 0

    def __len__(self) -> int:
        return len(self.sequences)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self.sequences

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over all, line by line. `peek` gives the order of service, one at a time."""
        return iter(list(self.sequences))

    def check(self, count: int = 1) -> None:
        """Raises `QueueFullError` unless `count` more may wait."""
        if len(self) + count > self.max_waiting:
            wanted = "" if count == 1 else f", and {count} more do not fit"
            raise QueueFullError(
                f"{len(self)} requests are waiting already, of {self.max_waiting} that may{wanted}: try again later, or raise max_waiting"
            )

    def push(self, sequence: Sequence) -> None:
        """Add a new sequence. Raises `QueueFullError`."""
        self.check()
        line = self._line(sequence.priority, sequence.client_id)
        line.members[sequence] = None
        self._note_entry(sequence, line)

    def push_back(self, sequence: Sequence) -> None:
        """Add a sequence that was accepted before. It precedes all new ones of its priority and is never refused."""
        line = self._line(sequence.priority, None)
        later = [s for s in line.members if s.arrival > sequence.arrival]
        line.members[sequence] = None
        for s in later:
            line.members.move_to_end(s)
        self._note_entry(sequence, line)

    def peek(self) -> Sequence | None:
        """The next sequence, which stays in the queue."""
        while self._heap:
            key, _, line = self._heap[0]
            if key != line.entered:
                heapq.heappop(self._heap)
            elif not line.members:
                heapq.heappop(self._heap)
                line.entered = None
            elif key != (now := self._key(line)):
                line.entered = now
                heapq.heapreplace(self._heap, (now, self._next_ticket(), line))
            else:
                return next(iter(line.members))
        return None

    def remove(self, sequence: Sequence) -> bool:
        """Remove a sequence. Returns True if it was waiting."""
        line = self.sequences.pop(sequence, None)
        if line is None:
            return False
        del line.members[sequence]
        if not line.members:
            del self._lines[line.priority, line.client]
            line.entered = None
            self._drop_stale()
        return True

    @contextmanager
    def aside(self) -> Iterator[Callable[[Sequence], int]]:
        """Yield a function that sets a sequence aside and returns how many are. At the end all return to their places."""
        passed: list[tuple[Sequence, _Line]] = []

        def set_aside(sequence: Sequence) -> int:
            passed.append((sequence, self.sequences[sequence]))
            self.remove(sequence)
            return len(passed)

        try:
            yield set_aside
        finally:
            for sequence, before in reversed(passed):
                line = self._line(before.priority, before.client)
                line.members[sequence] = None
                line.members.move_to_end(sequence, last=False)
                self._note_entry(sequence, line)

    def expired(self, now: float) -> list[Sequence]:
        """Sequences whose deadline has passed; they stay until they are removed."""
        if not self._deadlines or self._deadlines[0][0] > now:
            return []
        passed = []
        while self._deadlines and self._deadlines[0][0] <= now:
            entry = heapq.heappop(self._deadlines)
            if entry[2] in self.sequences:
                passed.append(entry)
        for entry in passed:
            heapq.heappush(self._deadlines, entry)
        return list(dict.fromkeys(sequence for _, _, sequence in passed))

    def _line(self, priority: int, client: str | None) -> _Line:
        line = self._lines.get((priority, client))
        if line is None:
            line = self._lines[priority, client] = _Line(priority, client)
        return line

    def _note_entry(self, sequence: Sequence, line: _Line) -> None:
        assert sequence not in self.sequences, "it is waiting already"
        self.sequences[sequence] = line
        key = self._key(line)
        if line.entered is None or key < line.entered:
            line.entered = key
            heapq.heappush(self._heap, (key, self._next_ticket(), line))
        if sequence.deadline is not None:
            heapq.heappush(self._deadlines, (sequence.deadline, self._next_ticket(), sequence))

    def _key(self, line: _Line) -> Key:
        arrival = next(iter(line.members)).arrival
        if line.client is None:
            return line.priority, 0, 0.0, arrival
        return line.priority, 1, self.service.of(line.client), arrival

    def _drop_stale(self) -> None:
        """Drop stale entries of both heaps if they are the majority. Otherwise they are dropped at the top."""
        if len(self._heap) > 2 * len(self._lines) + 64:
            self._heap = [entry for entry in self._heap if entry[0] == entry[2].entered]
            heapq.heapify(self._heap)
        if len(self._deadlines) > 2 * len(self.sequences) + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[2] in self.sequences]
            heapq.heapify(self._deadlines)

    def _next_ticket(self) -> int:
        self._ticket += 1
        return self._ticket
