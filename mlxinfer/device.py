"""The device that MLX computes on: its memory, and the dtype it is quick in."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from .limits import memory_limit
from .metrics import peak_rss

_WIRED_SHARE = 0.6
"""Of a Mac's memory. Kernels have panicked where three quarters of it and more were wired, which the recommended working set allows."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """`total` bytes there are, and `usable` bytes that a model and its cache may take without harm to the rest of the machine. `source`
    says what the total is the limit of. `buffers` is how many of them there can be (Metal's limit), None where nobody counts."""

    total: int
    usable: int
    source: str = "physical memory"
    buffers: int | None = None


def is_gpu() -> bool:
    return mx.default_device().type == mx.DeviceType.gpu


def device_memory() -> DeviceMemory:
    """On a GPU at most what MLX recommends as working set; at most four fifths of the memory that this process is allowed."""
    total, source = memory_limit()
    if not is_gpu():
        return DeviceMemory(total, total * 4 // 5, source)
    info = mx.device_info()
    buffers = info.get("resource_limit")
    limit = int(buffers) if isinstance(buffers, int) and buffers > 0 else None
    recommended = info.get("max_recommended_working_set_size")
    if not isinstance(recommended, int) or recommended <= 0:
        return DeviceMemory(total, total * 4 // 5, source, limit)
    return DeviceMemory(int(info.get("memory_size", total)), min(recommended, total), "recommended working set", limit)


def limit_memory(wanted: int, spare: int) -> None:
    """Tell MLX, for the whole process, what was planned: `wanted` bytes are in use at most, and at most `spare` bytes of buffers that
    are not in use are kept for the next ones. On a Mac what is in use stays in memory, up to three fifths of it."""
    mx.set_cache_limit(spare)
    if mx.metal.is_available():
        mx.set_wired_limit(min(wanted, wired_limit()))


def wired_limit() -> int:
    """The most bytes that are ever wired."""
    recommended = mx.device_info().get("max_recommended_working_set_size", 0)
    return min(int(memory_limit()[0] * _WIRED_SHARE), int(recommended))


def peak_memory() -> int:
    """The most bytes held since the process began: by MLX on a GPU, by the whole process on a CPU, where packed weights lie in memory
    that MLX does not count."""
    return int(mx.get_peak_memory()) if is_gpu() else peak_rss()


def default_dtype() -> mx.Dtype:
    """bfloat16 on a GPU; float32 on the CPU, where MLX's 16-bit paths are several times slower."""
    return mx.bfloat16 if is_gpu() else mx.float32
