"""The device that MLX computes on: its memory, and the dtype it is quick in."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from .metrics import peak_rss


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """`total` bytes there are, and `usable` bytes that a model and its cache may take without harm to the rest of the machine."""

    total: int
    usable: int


def is_gpu() -> bool:
    return mx.default_device().type == mx.DeviceType.gpu


def device_memory() -> DeviceMemory:
    """On a GPU what MLX recommends as working set; elsewhere four fifths of the machine's (or the container's) memory."""
    info = mx.device_info()
    recommended = info.get("max_recommended_working_set_size") if is_gpu() else None
    total = _total_memory()
    if isinstance(recommended, int) and recommended > 0:
        return DeviceMemory(int(info.get("memory_size", total)), recommended)
    return DeviceMemory(total, total * 4 // 5)


def peak_memory() -> int:
    """The most bytes held since the process began: by MLX on a GPU, by the whole process on a CPU, where packed weights lie in memory
    that MLX does not count."""
    return int(mx.get_peak_memory()) if is_gpu() else peak_rss()


def default_dtype() -> mx.Dtype:
    """bfloat16 on a GPU; float32 on the CPU, where MLX's 16-bit paths are several times slower."""
    return mx.bfloat16 if is_gpu() else mx.float32


def _total_memory() -> int:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    try:
        text = limit.read_text().strip()
    except OSError:
        return physical
    return min(physical, int(text)) if text.isdigit() else physical
