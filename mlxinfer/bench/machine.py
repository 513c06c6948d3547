"""Measures this machine: reading and copying memory, multiply-adds.

The rates are the best of several passes. On a GPU MLX is measured, on a CPU NumPy with one thread per allowed processor, because MLX's own
CPU operations use a small part of the machine.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter

import mlx.core as mx
import numpy as np

from ..util.device import allowed_threads, device_info, is_gpu, processor_name

_LEAST_BYTES, _MOST_BYTES = 1 << 24, 1 << 30
_LEAST_PASSES, _LEAST_SECONDS = 5, 0.3
_SIDE = {"gpu": 4096, "cpu": 1024}


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates per second. A copied byte counts twice (read and written), a multiply-add as two operations."""

    device: str
    """Name of the GPU or the processor."""
    threads: int
    """Processors that this process may use; on a CPU the threads that measured."""
    buffer_bytes: int
    """Size of the buffer; one smaller than the processor's cache measures the cache."""
    read_bytes: float
    """Bytes read per second."""
    copy_bytes: float
    """Bytes copied per second."""
    operations: float
    """Multiplications and additions per second, in a large product of matrices."""
    operations_dtype: str
    """Dtype of that product."""


def measure_machine(nbytes: int) -> Machine:
    """Measure the machine. `nbytes`: size of the buffer (16 MiB to 1 GiB). The size of the weights gives the rate at which they can be
    read."""
    size = min(max(nbytes, _LEAST_BYTES), _MOST_BYTES) // 64 * 64
    read, copy, multiply, dtype = _gpu_rates(size) if is_gpu() else _cpu_rates(size, allowed_threads())
    return Machine(_device_name(), allowed_threads(), size, read, copy, multiply, dtype)


def _cpu_rates(size: int, threads: int) -> tuple[float, float, float, str]:
    source = np.ones(size // 4, np.int32)
    target = np.zeros_like(source)
    parts, targets = np.array_split(source, threads), np.array_split(target, threads)
    matrix = np.ones((_SIDE["cpu"],) * 2, np.float32)
    with ThreadPoolExecutor(threads) as pool:
        # Reductions and copies release the interpreter's lock.
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


def _device_name() -> str:
    return str(device_info().get("device_name", "GPU")) if is_gpu() else processor_name() or platform.processor() or platform.machine()
