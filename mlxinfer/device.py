"""The device that MLX computes on: its memory, and the dtype it is quick in."""

from __future__ import annotations

import os
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

import mlx.core as mx

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


_PROC = Path("/proc/self")
_RESOURCES = (("address space", resource.RLIMIT_AS, "VmSize"), ("data", resource.RLIMIT_DATA, "VmData"))


def memory_limit(proc: Path = _PROC) -> tuple[int, str]:
    """The least of all limits in bytes, and which one it is."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([(physical, "physical memory"), *cgroup_limits(proc), *_resource_limits()])


def cgroup_limits(proc: Path = _PROC) -> Iterator[tuple[int, str]]:
    """Those of the process's own control group and of every one above it, of both versions; nothing where there are none."""
    try:
        groups = (proc / "cgroup").read_text(encoding="utf-8").splitlines()
        mounts = (proc / "mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names = ("memory.limit_in_bytes",) if controllers else ("memory.max", "memory.high")
        for folder in _folders(mounts, "memory" if controllers else None, path):
            for name in names:
                limit = _number(folder / name)
                if limit is not None:
                    yield limit, f"control group, {name}"


def _folders(mounts: list[str], controller: str | None, path: str) -> Iterator[Path]:
    """Where the files of a group and of its parents are, in the mounts of its hierarchy (`controller` None is version 2)."""
    for line in mounts:
        before, _, after = line.partition(" - ")
        kind, _, options = (*after.split(" "), "", "", "")[:3]
        root, mount = before.split(" ")[3:5]
        right = kind == "cgroup2" if controller is None else kind == "cgroup" and controller in options.split(",")
        if not right:
            continue
        # What is mounted may begin below the hierarchy's root; a path outside of it means that only the mount itself can be seen.
        own, top = PurePosixPath(path), PurePosixPath(root)
        inner = own.relative_to(top) if own.is_relative_to(top) else PurePosixPath()
        folder = Path(mount) / inner
        yield folder
        yield from (parent for parent in folder.parents if parent.is_relative_to(mount))


def _number(file: Path) -> int | None:
    try:
        text = file.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _resource_limits() -> Iterator[tuple[int, str]]:
    for name, kind, field in _RESOURCES:
        soft = resource.getrlimit(kind)[0]
        if soft != resource.RLIM_INFINITY:
            yield max(soft - _held_at_first(field), 0), f"resource limit of {name}"


@cache
def _held_at_first(field: str) -> int:
    """What the process had when this was first asked, before a model: a plan counts the model itself."""
    try:
        lines = (_PROC / "status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


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


def lower_thread_priority(nice: int) -> None:
    """Lower the calling thread's priority by `nice`, on Linux, where each thread has its own. Elsewhere, and where that is forbidden,
    nothing happens."""
    if nice and hasattr(os, "sched_getaffinity"):
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
