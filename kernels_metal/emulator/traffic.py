"""Bytes that kernels load from and store to device memory: what a kernel is bound by, counted rather than estimated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Traffic:
    """Of one buffer, all in bytes except the last two.

    loaded, stored: every access of every thread. fetched: loads, a byte once for each threadgroup that loads it, which is what comes from
    memory if a threadgroup finds again what it has loaded. distinct_*: a byte once. most_*: how often the busiest byte was loaded, stored.
    """

    size: int = 0
    loaded: int = 0
    stored: int = 0
    fetched: int = 0
    distinct_loaded: int = 0
    distinct_stored: int = 0
    most_loads: int = 0
    most_stores: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        """Of two launches: sums, except that the busiest byte is the busier one's."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__ if not name.startswith("most_")}
        return Traffic(**sums, most_loads=max(self.most_loads, other.most_loads), most_stores=max(self.most_stores, other.most_stores))


@dataclass(frozen=True)
class Launch:
    kernel: str
    buffers: dict[str, Traffic]


@dataclass
class Counts:
    """What was launched while counting; `counts["keys"]` adds up the buffers of that name, `counts.total()` everything."""

    launches: list[Launch] = field(default_factory=list)

    def __getitem__(self, name: str) -> Traffic:
        found = [launch.buffers[name] for launch in self.launches if name in launch.buffers]
        if not found:
            raise KeyError(f"no launch has a buffer {name!r}; there are {', '.join(sorted(self.names()))}")
        return sum(found, Traffic())

    def names(self) -> set[str]:
        return {name for launch in self.launches for name in launch.buffers}

    def of(self, kernel: str) -> Counts:
        """The launches of one kernel."""
        return Counts([launch for launch in self.launches if launch.kernel == kernel])

    def total(self) -> Traffic:
        return sum((buffer for launch in self.launches for buffer in launch.buffers.values()), Traffic())


_counting: list[Counts] = []


@contextmanager
def count_bytes() -> Iterator[Counts]:
    """Every launch inside runs in mode "trace", whatever mode it asks for, and is added to what this gives."""
    counts = Counts()
    _counting.append(counts)
    try:
        yield counts
    finally:
        _counting[:] = [other for other in _counting if other is not counts]  # equal ones are others


def counting() -> bool:
    return bool(_counting)


def record(launch: Launch) -> None:
    for counts in _counting:
        counts.launches.append(launch)
