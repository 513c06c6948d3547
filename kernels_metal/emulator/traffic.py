"""Counts the bytes that kernels load from and store to device memory, which limits the speed of most kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from .errors import Unavailable
from .toolchain import why_not


@dataclass(frozen=True)
class Traffic:
    """Traffic of one buffer, in bytes except for the last two."""

    size: int = 0
    """Bytes of the buffer."""
    loaded: int = 0
    """Loads of every thread."""
    stored: int = 0
    """Stores of every thread."""
    fetched: int = 0
    """Loads, counting a byte once per threadgroup: the memory traffic if a threadgroup's repeated loads hit a cache."""
    distinct_loaded: int = 0
    """Different bytes that were loaded."""
    distinct_stored: int = 0
    """Different bytes that were stored."""
    most_loads: int = 0
    """Loads of the most loaded byte."""
    most_stores: int = 0
    """Stores to the most stored byte."""

    def __add__(self, other: Traffic) -> Traffic:
        """Totals of two launches; the last two fields are maxima."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__ if not name.startswith("most_")}
        return Traffic(**sums, most_loads=max(self.most_loads, other.most_loads), most_stores=max(self.most_stores, other.most_stores))


@dataclass(frozen=True)
class Launch:
    """Traffic of one launch."""

    kernel: str
    buffers: dict[str, Traffic]
    """`Traffic` by the name of the input or output."""


@dataclass
class Counts:
    """Counted launches. `counts["keys"]` sums the buffers of that name, `counts.total()` all buffers."""

    launches: list[Launch] = field(default_factory=list)
    """In order."""

    def __getitem__(self, name: str) -> Traffic:
        found = [launch.buffers[name] for launch in self.launches if name in launch.buffers]
        if not found:
            raise KeyError(f"no launch has a buffer {name!r}; there are {', '.join(sorted(self.names()))}")
        return sum(found, Traffic())

    def names(self) -> set[str]:
        """Names of all buffers."""
        return {name for launch in self.launches for name in launch.buffers}

    def of(self, kernel: str) -> Counts:
        """The launches of one kernel."""
        return Counts([launch for launch in self.launches if launch.kernel == kernel])

    def total(self) -> Traffic:
        """Traffic of all buffers in all launches."""
        return sum((buffer for launch in self.launches for buffer in launch.buffers.values()), Traffic())


_counting: list[Counts] = []


@contextmanager
def count_bytes() -> Iterator[Counts]:
    """Run every launch inside the block in mode "trace", whatever its own mode, and add it to the returned counts. Raises `Unavailable`
    if that mode cannot run."""
    if lack := why_not("trace"):
        raise Unavailable(lack)
    counts = Counts()
    _counting.append(counts)
    try:
        yield counts
    finally:
        _counting[:] = [other for other in _counting if other is not counts]  # by identity: equal counts may belong to another block


def counting() -> bool:
    """True inside a `count_bytes` block."""
    return bool(_counting)


def record(launch: Launch) -> None:
    """Add a launch to every active `count_bytes` block."""
    for counts in _counting:
        counts.launches.append(launch)
