"""The GPU, and the time of calls on it."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from time import perf_counter

import click
import mlx.core as mx

from mlxinfer.util.device import has_metal
from mlxinfer.util.mac import Power, power, thermal_lines

FRESH_BYTES = 1 << 30
"""More bytes than the caches of any GPU."""

Calls = list[Callable[[], mx.array]]


def require_gpu(what: str) -> None:
    """Raise `click.ClickException` without a GPU."""
    if not has_metal() and not mx.cuda.is_available():
        raise click.ClickException(
            f"{what} on a GPU needs an Apple GPU, or an NVIDIA GPU and MLX for it (pip install 'mlx[cuda]'); this machine has neither"
        )


def device_name() -> str:
    information = mx.device_info(mx.gpu)
    return str(information.get("device_name", information.get("architecture", "GPU")))


def conditions() -> str:
    """Return one line with the GPU and everything else that decides its speed."""
    buffers = ", ".join(f"{name}={os.environ[name]}" for name in _BUFFERS if name in os.environ) or "MLX's own command buffers"
    lines = [device_name(), f"power: {power()}" if power() != Power() else "", *thermal_lines(), buffers]
    return "; ".join(line for line in lines if line)


_BUFFERS = ("MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER")


def copy_bandwidth(size: int = FRESH_BYTES, samples: int = 10) -> float:
    """Bytes per second, read plus written, of adding 1 to an array."""
    x = mx.zeros((size // 4,), mx.uint32)
    mx.eval(x)
    return 2 * x.nbytes / median_time([lambda: x + 1], samples)


def median_time(calls: Calls, samples: int, clock: Callable[[], float] = perf_counter) -> float:
    """Seconds of a call. All calls of a sample are evaluated together; building their graphs does not count."""
    mx.eval([call() for call in calls])
    times = []
    for _ in range(samples):
        graphs = [call() for call in calls]
        mx.synchronize()
        begin = clock()
        mx.eval(graphs)
        mx.synchronize()
        times.append(clock() - begin)
    return statistics.median(times) / len(calls)
