"""A control group that limits the memory of the processes in it, cached pages of files included."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from time import sleep
from types import TracebackType

from mlxinfer.util.device import memory_groups, number_in
from mlxinfer.util.uncached_file import drop_pages

_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes"),
    2: ("memory.max", "memory.current", "memory.peak"),
}
_PATIENCE_S = 10.0


class MemoryCap(AbstractContextManager["MemoryCap"]):
    """Makes a control group below that of this process, and removes it. Raises `OSError` where that is not allowed."""

    def __init__(self) -> None:
        found = next(memory_groups(), None)
        if found is None:
            raise OSError("this system has no control groups")
        parent, version = found
        self._limit, self._usage, self._peak = _FILES[version]
        self._folder = parent / f"mlxinfer-experts-{os.getpid()}"
        self._folder.mkdir()
        if not (self._folder / self._limit).exists():
            self._folder.rmdir()
            raise OSError(f"{parent} has no memory controller for groups below it")

    def command(self, command: list[str]) -> list[str]:
        """Return a command that runs in the group."""
        return ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(self._folder), *command]

    def set(self, nbytes: int) -> None:
        """Limit the group to `nbytes`. The kernel frees cached pages first, and writes new ones to the disk before. Raises `OSError` if
        that is not enough."""
        waited = 0.0
        while True:
            try:
                (self._folder / self._limit).write_text(str(nbytes))
                return
            except OSError as error:
                if waited >= _PATIENCE_S:
                    raise OSError(f"{self.usage() / 1e9:.2f} GB of the process do not fit in {nbytes / 1e9:.2f} GB") from error
            sleep(0.5)
            waited += 0.5

    def usage(self) -> int:
        """Bytes of the group now, with cached pages of files."""
        return number_in(self._folder / self._usage) or 0

    def peak(self) -> int:
        """The most bytes that the group had; 0 if the kernel does not report it."""
        return number_in(self._folder / self._peak) or 0

    def swapped(self) -> int:
        """Bytes of the group that were swapped out."""
        lines = (self._folder / "memory.stat").read_text(encoding="ascii").splitlines()
        values = dict(line.split() for line in lines)
        return int(values.get("total_swap", values.get("swap", 0)))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        waited = 0.0
        while waited < _PATIENCE_S and (self._folder / "cgroup.procs").read_text(encoding="ascii").strip():
            sleep(0.05)
            waited += 0.05
        with suppress(OSError):
            self._folder.rmdir()


def read_ahead(path: Path) -> int | None:
    """Return the KB that Linux reads ahead in mapped files on this disk; None if unknown. A fault may read that much for one page."""
    device = path.stat().st_dev
    disk = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    found = number_in(disk / "queue" / "read_ahead_kb")
    return number_in(disk.resolve().parent / "queue" / "read_ahead_kb") if found is None else found  # of a partition


def drop_file(path: Path) -> None:
    """Drop the cached pages of a file, so that the next process starts without them. Linux only."""
    descriptor = os.open(path, os.O_RDONLY)
    drop_pages(descriptor)
    os.close(descriptor)
