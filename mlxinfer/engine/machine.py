"""What this machine can do, measured: reading and copying memory, multiply-adds; and what this process has used of it.

The rates are the best of several passes, so they are what is possible, not what is usual. On a GPU MLX measures, on a CPU numpy with one
thread per processor allowed, because MLX's own CPU operations use a small part of the machine.
"""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import mlx.core as mx
import numpy as np

from ..device import is_gpu

_LEAST_BYTES, _MOST_BYTES = 1 << 24, 1 << 30
_LEAST_PASSES, _LEAST_SECONDS = 5, 0.3
_SIDE = {"gpu": 4096, "cpu": 1024}


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates per second. A copied byte counts twice, as it is read and written; a multiply-add is two operations."""

    device: str
    threads: int
    buffer_bytes: int
    """Size of what was read: smaller than the processor's cache, it measures that."""
    read_bytes: float
    copy_bytes: float
    operations: float
    operations_dtype: str


def measure_machine(nbytes: int) -> Machine:
    """`nbytes` is the size of the buffer to read (16 MiB to 1 GiB): that of the weights gives the rate at which they could be read."""
    size = min(max(nbytes, _LEAST_BYTES), _MOST_BYTES) // 64 * 64
    read, copy, multiply, dtype = _gpu_rates(size) if is_gpu() else _cpu_rates(size, allowed_threads())
    return Machine(device_name(), allowed_threads(), size, read, copy, multiply, dtype)


def _cpu_rates(size: int, threads: int) -> tuple[float, float, float, str]:
    source = np.ones(size // 4, np.int32)
    target = np.zeros_like(source)
    parts, targets = np.array_split(source, threads), np.array_split(target, threads)
    matrix = np.ones((_SIDE["cpu"],) * 2, np.float32)
    with ThreadPoolExecutor(threads) as pool:
        # Reductions and copies let go of the interpreter's lock.
        read = _best(lambda: list(pool.map(np.maximum.reduce, parts)))
        copy = _best(lambda: list(pool.map(np.copyto, targets, parts)))
    multiply = _best(lambda: matrix @ matrix)
    return size / read, 2 * size / copy, 2 * len(matrix) ** 3 / multiply, "float32"


def _gpu_rates(size: int) -> tuple[float, float, float, str]:
    source = mx.ones((size // 4,), mx.int32)
    matrix = mx.ones((_SIDE["gpu"],) * 2, mx.bfloat16)
    mx.eval(source, matrix)
    read = _best(lambda: mx.eval(mx.max(source)))
    copy = _best(lambda: mx.eval(source + 1))
    multiply = _best(lambda: mx.eval(matrix @ matrix))
    return size / read, 2 * size / copy, 2 * matrix.shape[0] ** 3 / multiply, "bfloat16"


def _best(once: Callable[[], object]) -> float:
    """Seconds of the quickest pass."""
    times: list[float] = []
    while len(times) < _LEAST_PASSES or sum(times) < _LEAST_SECONDS:
        start = perf_counter()
        once()
        times.append(perf_counter() - start)
    return min(times)


def device_name() -> str:
    """The GPU's name, or the processor's."""
    if is_gpu():
        return str(mx.device_info().get("device_name", "GPU"))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def allowed_threads() -> int:
    """`MLXINFER_THREADS`, or the processors that this process may use."""
    wanted = os.environ.get("MLXINFER_THREADS", "")
    if wanted.isascii() and wanted.isdigit() and 1 <= int(wanted) <= 256:
        return int(wanted)
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def peak_rss() -> int:
    """Bytes of memory that this process has held at most. On a Mac, without what only the GPU holds."""
    try:
        # Not getrusage: on Linux that starts at what the process held that this one was started from.
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
