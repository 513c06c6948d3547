"""Memory pressure: how many bytes this process should free now, so that the system neither swaps nor kills it.

On Linux the limits of control groups, the free memory and the stalls that the kernel reports (PSI) decide. On macOS the level of
`kern.memorystatus_vm_pressure_level` does.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from .dataclass import dataclass
from .device import memory_groups, number_in

_MARGIN = 0.05
"""Share of a limit, or of the whole memory, that should stay free."""
_CUSHION = 0.05
"""Share of it that is freed in addition, because other programs may be taking more at this moment."""
_STALLS = 10.0
"""Percent of the last ten seconds in which a process waited for memory; from here on memory is short."""
_STALLED_SHARE = 0.02
"""Share of the memory to free for each look at which the system reports stalls or a warning."""
_CRITICAL_SHARE = 0.08
"""The same for a critical level."""
_UNLIMITED = 2**60
"""Limits from here on are none, as version 1 of control groups writes them."""
_WARNING, _CRITICAL = 2, 4
"""Levels of macOS; 1 is normal."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """State of the memory. Bytes."""

    short: int
    """Bytes to free now; 0 without pressure."""
    spare: int
    """Bytes that may be used in addition without pressure; 0 under pressure."""


def memory_pressure(total: int, margin: int = 0, *, proc: Path = Path("/proc"), level: int | None = None) -> Pressure:
    """Return the pressure on a machine with `total` bytes, of which `margin` more than usual should stay free.

    `proc` and `level`, that of macOS, replace the system's in tests.
    """
    if sys.platform == "darwin" or level is not None:
        return _on_mac(total, _level() if level is None else level)
    frees = [*_free_of_groups(proc / "self"), *_free_of_system(proc, total)]
    left, cushion = min(((free - int(limit * _MARGIN) - margin, int(limit * _CUSHION)) for free, limit in frees), default=(0, 0))
    stalled = _stalls(proc / "pressure" / "memory") >= _STALLS
    short = max(cushion - left if left < 0 else 0, int(total * _STALLED_SHARE) if stalled and left < total * _CRITICAL_SHARE else 0)
    return Pressure(short, 0 if short or stalled else max(left, 0))


def _on_mac(total: int, level: int) -> Pressure:
    if level >= _CRITICAL:
        return Pressure(int(total * _CRITICAL_SHARE), 0)
    if level >= _WARNING:
        return Pressure(int(total * _STALLED_SHARE), 0)
    return Pressure(0, int(total * _STALLED_SHARE))


def _level() -> int:
    """Return the pressure level of macOS; 1, which is normal, if it cannot be read."""
    try:
        value, size = ctypes.c_int(1), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
        failed = ctypes.CDLL(None).sysctlbyname(
            b"kern.memorystatus_vm_pressure_level", ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)
        )
    except (OSError, AttributeError):
        return 1
    return 1 if failed else value.value


def _free_of_groups(proc: Path) -> list[tuple[int, int]]:
    """Return (free bytes, limit) of each control group with a limit. Pages of files count as free: the kernel drops them first."""
    found = []
    for folder, version in memory_groups(proc):
        limit = number_in(folder / ("memory.limit_in_bytes" if version == 1 else "memory.max"))
        usage = number_in(folder / ("memory.usage_in_bytes" if version == 1 else "memory.current"))
        if limit is None or usage is None or limit >= _UNLIMITED:
            continue
        stat = _fields(folder / "memory.stat", " ")
        prefix = "total_" if version == 1 else ""
        files = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
        found.append((limit - max(usage - files, 0), limit))
    return found


def _free_of_system(proc: Path, total: int) -> list[tuple[int, int]]:
    available = _fields(proc / "meminfo", ":").get("MemAvailable")
    return [] if available is None else [(available * 1024, total)]


def _fields(file: Path, separator: str) -> dict[str, int]:
    """Return the numbers in a file with a name and a number a line."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.partition(separator) for line in lines)
    return {name: int(rest.split()[0]) for name, _, rest in pairs if rest.split()[:1] and rest.split()[0].isdigit()}


def _stalls(file: Path) -> float:
    """Return the percent of the last ten seconds in which some process waited for memory; 0 if the kernel does not report it."""
    try:
        line = file.read_text(encoding="utf-8").partition("\n")[0]
    except OSError:
        return 0.0
    words = dict(word.split("=") for word in line.split() if "=" in word)
    try:
        return float(words.get("avg10", 0.0))
    except ValueError:
        return 0.0
