"""Device of MLX: memory, threads and fastest dtype."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath

import mlx.core as mx

from .dataclass import dataclass
from .environment import is_gigabytes
from .mac import WITH_MATRIX_UNITS, gpu_generation

_WIRED_SHARE = 0.6
"""Maximum fraction of a Mac's memory to wire. At the recommended working set, three quarters, macOS kernels have panicked."""

WIRED_GB = "MLXINFER_WIRED_GB"
_USUAL_BUFFER = 50
"""MLX's default of `MLX_MAX_MB_PER_BUFFER`."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory available to MLX."""

    total: int
    usable: int
    """Bytes that a model and its cache may use without harm to the rest of the machine."""
    source: str = "physical memory"
    """Name of the limit behind `total`."""
    buffers: int | None = None
    """Maximum number of live arrays (Metal's limit); None for no limit."""
    reserved: int = 0
    """Bytes of `usable` that are taken: reserved for other models of the process, and other memory of MLX."""


def is_gpu() -> bool:
    """Return True if models compute on a GPU."""
    return mx.default_device().type == mx.DeviceType.gpu and (not mx.metal.is_available() or _has_device())


def has_metal() -> bool:
    """Return True if there is a Metal device. MLX only says whether it was built with Metal."""
    return mx.metal.is_available() and _has_device()


@cache
def _has_device() -> bool:
    """Return False on a Mac without a Metal device, such as a virtual machine, where the CPU becomes MLX's default device."""
    try:
        mx.device_info()
    except RuntimeError:
        mx.set_default_device(mx.cpu)
        return False
    return True


def device_info() -> dict[str, str | int]:
    """Return MLX's description of the device; {} on a Mac without a Metal device."""
    return mx.device_info() if not mx.metal.is_available() or _has_device() else {}


def no_device_lines() -> list[str]:
    """Return a note for the user of a Mac without a Metal device."""
    return (
        ["there is no Metal device (a virtual machine?): models run on the CPU, slowly"]
        if mx.metal.is_available() and not has_metal()
        else []
    )


def device_memory() -> DeviceMemory:
    """Return the device's memory: at most four fifths of the process's limit, on a GPU at most MLX's recommended working set."""
    total, source = memory_limit()
    if not is_gpu():
        return DeviceMemory(total, total * 4 // 5, source)
    info = device_info()
    buffers = info.get("resource_limit")
    limit = int(buffers) if isinstance(buffers, int) and buffers > 0 else None
    if isinstance(own := info.get("total_memory"), int):  # an NVIDIA GPU has separate memory
        return DeviceMemory(own, own * 4 // 5, "GPU memory", limit)
    recommended = info.get("max_recommended_working_set_size")
    if not isinstance(recommended, int) or recommended <= 0:
        return DeviceMemory(total, total * 4 // 5, source, limit)
    return DeviceMemory(int(info.get("memory_size", total)), min(recommended, total), "recommended working set", limit)


def clear_cache() -> None:
    """Free MLX's unused buffers.

    On a CPU, MLX first waits for its streams. `mx.clear_cache` holds the GIL meanwhile, and a step with experts in a file calls Python from
    a stream: both would wait for ever.
    """
    free = _without_gil("_ZN3mlx4core11clear_cacheEv")
    if free is None:
        mx.clear_cache()
    else:
        free()


def _set_cache_limit(nbytes: int) -> int:
    """Set the bytes of unused buffers that MLX keeps, as `clear_cache` frees them. Returns the limit before."""
    limit = _without_gil("_ZN3mlx4core15set_cache_limitEm")
    return mx.set_cache_limit(nbytes) if limit is None else limit(nbytes)


@cache
def _without_gil(symbol: str) -> Callable[..., int] | None:
    """Return a function of MLX's library that runs without the GIL; None on a GPU, and if the library has another form."""
    if is_gpu():
        return None
    import ctypes

    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(str(Path(mx.__file__).parent / "lib" / f"libmlx.{'dylib' if sys.platform == 'darwin' else 'so'}"))
        function = library[symbol]
        function.argtypes, function.restype = ([ctypes.c_size_t] if symbol.endswith("Em") else []), ctypes.c_size_t
        return function
    return None


_before: dict[str, int] = {}
"""MLX's limits before `limit_memory`."""


def limit_memory(*, wired: int, spare: int, most: int) -> None:
    """Set MLX's limits for the process, in bytes.

    MLX keeps at most `spare` bytes of freed buffers. On a Mac, `wired` bytes stay resident, up to three fifths of the memory. With `most`
    bytes in use, MLX waits for running operations before it starts more; otherwise it runs ten layers ahead, with the copies of each.
    """
    _before.setdefault("cache", _set_cache_limit(spare))
    if has_metal():
        mx.set_wired_limit(min(wired, wired_limit()))
        _before.setdefault("memory", mx.set_memory_limit(most))


def lift_limits() -> None:
    """Undo `limit_memory`."""
    if "cache" in _before:
        _set_cache_limit(_before.pop("cache"))
    if "memory" in _before:
        mx.set_wired_limit(0)
        mx.set_memory_limit(_before.pop("memory"))


def command_buffer_numbers() -> int:
    """Return the approximate number of elements per Metal command buffer. Their arrays are freed only when the buffer is done."""
    text = os.environ.get("MLX_MAX_MB_PER_BUFFER", "")  # MLX compares it with elements, not bytes
    return (int(text) if text.isascii() and text.isdigit() else _USUAL_BUFFER) * 2**20


def wired_limit() -> int:
    """Return the maximum bytes to wire: `MLXINFER_WIRED_GB` or a share of the memory, and at most the recommended working set."""
    recommended = device_info().get("max_recommended_working_set_size", 0)
    text = os.environ.get(WIRED_GB, "").strip()
    most = float(text) * 1e9 if is_gigabytes(text) else memory_limit()[0] * _WIRED_SHARE
    return min(int(most), int(recommended))


def peak_memory() -> int:
    """Return the peak bytes: MLX's on a GPU, the process's on a CPU, where MLX does not count packed weights."""
    return int(mx.get_peak_memory()) if is_gpu() else peak_rss()


def memory_in_use() -> int:
    """Return the bytes in use: MLX's on a GPU, the process's on a CPU, or its peak if the system reports only that."""
    if is_gpu():
        return int(mx.get_active_memory())
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return peak_rss()
    return pages * os.sysconf("SC_PAGE_SIZE")


def default_dtype() -> mx.Dtype:
    """Return bfloat16 on a GPU, float32 on a CPU, where MLX's 16-bit paths are several times slower."""
    return mx.bfloat16 if is_gpu() else mx.float32


def rounds_float32() -> bool:
    """Return True if the GPU's matrix units round float32 factors to TF32 (10 mantissa bits): M5 and later, and NVIDIA's.

    The environment may forbid TF32.
    """
    if os.environ.get("MLX_ENABLE_TF32", "1") == "0":
        return False
    if not has_metal():
        return mx.cuda.is_available() and is_gpu()
    return gpu_generation(str(device_info().get("architecture", ""))) >= WITH_MATRIX_UNITS


_PROC = Path("/proc/self")
_RESOURCES = (("address space", resource.RLIMIT_AS, "VmSize"), ("data", resource.RLIMIT_DATA, "VmData"))


def memory_limit(proc: Path = _PROC) -> tuple[int, str]:
    """Return (lowest memory limit in bytes, its name)."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([(physical, "physical memory"), *cgroup_limits(proc), *_resource_limits()])


def cgroup_limits(proc: Path = _PROC) -> Iterator[tuple[int, str]]:
    """Yield (limit in bytes, name) of the process's control group and its parents, cgroup v1 and v2."""
    for folder, version in memory_groups(proc):
        for name in ("memory.limit_in_bytes",) if version == 1 else ("memory.max", "memory.high"):
            limit = number_in(folder / name)
            if limit is not None:
                yield limit, f"control group, {name}"


def memory_groups(proc: Path = _PROC) -> Iterator[tuple[Path, int]]:
    """Yield (folder, version 1 or 2) of the process's control group for memory and of its parents."""
    try:
        groups = (proc / "cgroup").read_text(encoding="utf-8").splitlines()
        mounts = (proc / "mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        for folder in _folders(mounts, "memory" if controllers else None, path):
            yield folder, 1 if controllers else 2


def _folders(mounts: list[str], controller: str | None, path: str) -> Iterator[Path]:
    """Yield the folders of a group and its parents in the mounts of a hierarchy; `controller` None is version 2."""
    for line in mounts:
        before, _, after = line.partition(" - ")
        kind, _, options = (*after.split(" "), "", "", "")[:3]
        root, mount = before.split(" ")[3:5]
        right = kind == "cgroup2" if controller is None else kind == "cgroup" and controller in options.split(",")
        if not right:
            continue
        # A mount may start below the hierarchy's root. For a path outside of it, only the mount itself is visible.
        own, top = PurePosixPath(path), PurePosixPath(root)
        inner = own.relative_to(top) if own.is_relative_to(top) else PurePosixPath()
        folder = Path(mount) / inner
        yield folder
        yield from (parent for parent in folder.parents if parent.is_relative_to(mount))


def number_in(file: Path) -> int | None:
    """Return the whole number in a file; None for another text or an unreadable file."""
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
    """Return the bytes of the process at the first call, before a model was loaded, because a plan counts the model itself."""
    try:
        lines = (_PROC / "status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


_MOST_THREADS = 256


def allowed_threads() -> int:
    """Return `MLXINFER_THREADS`, or the number of processors available to the process."""
    wanted = os.environ.get("MLXINFER_THREADS", "").strip()
    if wanted.isascii() and wanted.isdigit() and 1 <= int(wanted[:9]) <= _MOST_THREADS:
        return int(wanted)
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def peak_rss() -> int:
    """Return the peak resident bytes of the process; on a Mac without GPU-only memory."""
    try:
        # Not getrusage: on Linux its peak is inherited from the parent process.
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def processor_name() -> str:
    """Return the processor's model name, or "" if the system does not report it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
