"""The GPU, and the time of calls on it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter

import click
import mlx.core as mx

FRESH_BYTES = 1 << 30
"""More bytes than the caches of any GPU."""

Calls = list[Callable[[], mx.array]]


def require_gpu(what: str) -> None:
    """Raise `click.ClickException` without a GPU."""
    if not mx.metal.is_available() and not mx.cuda.is_available():
        raise click.ClickException(
            f"{what} on a GPU needs an Apple GPU, or an NVIDIA GPU and MLX for it (pip install 'mlx[cuda]'); this machine has neither"
        )


def device_name() -> str:
    information = mx.device_info(mx.gpu)
    return str(information.get("device_name", information.get("architecture", "GPU")))


def copy_bandwidth(size: int = FRESH_BYTES, samples: int = 10) -> float:
    """Bytes per second, read plus written, of adding 1 to an array."""
    x = mx.zeros((size // 4,), mx.uint32)
    mx.eval(x)
    return 2 * x.nbytes / median_time([lambda: x + 1], samples)


def median_time(calls: Calls, samples: int) -> float:
    """Seconds of a call. All calls of a sample are evaluated together."""
    mx.eval([call() for call in calls])
    times = []
    for _ in range(samples):
        mx.synchronize()
        begin = perf_counter()
        mx.eval([call() for call in calls])
        mx.synchronize()
        times.append(perf_counter() - begin)
    return statistics.median(times) / len(calls)
