"""The peak of a script's resident memory, measured in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_MEASURE = """
import resource
if sys.platform == "darwin":
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
else:  # ru_maxrss begins there with that of the process which started this one
    peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(peak)
"""


def peak_rss(script: str, *arguments: str) -> tuple[int, str]:
    """Bytes, and what the script printed. It finds `sys` imported."""
    command = [sys.executable, "-c", f"import sys\n{script}\n{_MEASURE}", *arguments]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    text, _, peak = printed.rpartition("\n")
    return int(peak), text


def rss() -> int:
    """Bytes of this process that are in memory; 0 where the system does not tell."""
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if file.exists() else 0
