"""The machine and the versions of a result."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

from mlxinfer.util.device import processor_name

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("mlxinfer", "mlx", "mlx-lm", "llama-cpp-python", "numpy", "transformers", "tokenizers")


def pin(cpus: list[int]) -> list[int]:
    """Restrict this process, and those it starts, to `cpus` if there are any (Linux). Returns the allowed processors. Raises OSError for
    processors that do not exist."""
    if sys.platform != "linux":
        return list(range(os.cpu_count() or 1))
    if cpus:
        os.sched_setaffinity(0, cpus)
    return sorted(os.sched_getaffinity(0))


def describe() -> dict[str, Any]:
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor_name() or platform.processor(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "commit": _commit(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    """This project's commit, with a plus if files differ from it; "" outside a repository."""
    command = ["git", "describe", "--always", "--dirty=+"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


class Window:
    """Measures the use of the processors from its creation on."""

    def __init__(self) -> None:
        self._start, self._busy = perf_counter(), _busy_seconds()

    def others(self, own: float) -> float:
        """Share of the processors that other processes used. `own` is the processor time of the measured process in seconds. Returns 0
        where the system does not report it."""
        elapsed = perf_counter() - self._start
        busy = _busy_seconds() - self._busy
        return min(max(busy - own, 0.0) / (elapsed * (os.cpu_count() or 1)), 1.0)


def _busy_seconds() -> float:
    """Processor time of all processes since the system started, including the hypervisor's share."""
    try:
        line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    except OSError:
        return 0.0
    user, nice, system, _idle, _waiting, hard, soft, stolen = map(int, line.split()[1:9])
    return (user + nice + system + hard + soft + stolen) / os.sysconf("SC_CLK_TCK")
