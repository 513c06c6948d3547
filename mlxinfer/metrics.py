"""What this process may use of the machine, and what it has used. Imports nothing heavy."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

_MOST_THREADS = 256


def allowed_threads() -> int:
    """`MLXINFER_THREADS`, or the processors that this process may use."""
    wanted = os.environ.get("MLXINFER_THREADS", "").strip()
    if wanted.isascii() and wanted.isdigit() and 1 <= int(wanted[:9]) <= _MOST_THREADS:
        return int(wanted)
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def peak_rss() -> int:
    """Bytes of memory that this process has held at most. On a Mac, without what only the GPU holds."""
    try:
        # Not getrusage: on Linux that begins with the peak of the process which started this one.
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def processor_name() -> str:
    """The model of the processor, or "" where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
