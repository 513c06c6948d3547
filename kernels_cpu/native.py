"""Finds and loads the compiled module `_native`, whose types are in `_native.pyi`."""

from __future__ import annotations

import importlib
import json
import os
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..util.dataclass import dataclass

if TYPE_CHECKING:
    from . import _native as native
    from ._native import AttentionPlan, Blocks, Layout, Rotation, WeightFile
else:
    AttentionPlan = Blocks = Layout = Rotation = WeightFile = object  # annotations name these where the module is missing too

__all__ = [
    "INSTRUCTIONS_VERSION",
    "AttentionPlan",
    "Blocks",
    "Layout",
    "Rotation",
    "WeightFile",
    "available",
    "in_use",
    "isa_name",
    "missing_lines",
    "native",
    "status",
    "thread_count",
]

INSTRUCTIONS_VERSION = 2
"""Version of the instructions for blocks, as in src/blocks/bindings.cpp. A module of another version gets none."""

BUILD_NOTE = "_native.json"
"""Written by setup.py next to the module: `{"mlx": version}`, or `{"failed": reason}`."""

_COST = "matrices and attention then run on MLX's own CPU operations, some thirty times slower"
_REBUILD = "pip install --force-reinstall --no-deps --no-cache-dir mlxinfer"


@dataclass(frozen=True, slots=True)
class _Loaded:
    module: ModuleType | None
    problem: str | None = None


_OFF = "switched off by MLXINFER_CPU_KERNELS=0"
_NOT_BUILT = "not built (on Linux pip install does so where a C++ compiler is present)"


@cache
def _loaded() -> _Loaded:
    problem = _obstacle()
    if problem is not None:
        return _Loaded(None, problem)
    try:
        import mlx.core  # loads libmlx, which the module is linked with

        module = importlib.import_module("._native", __package__)
        if not module.isa_name():  # a kernel would be an illegal instruction
            return _Loaded(None, _no_isa(module))
        module.silu_multiply(mlx.core.zeros((0,)), mlx.core.zeros((0,)))
    except ImportError as error:
        return _Loaded(None, f"the native module does not load ({error}); rebuild it: {_REBUILD}")
    except TypeError:
        return _Loaded(None, f"the native module was built with another nanobind than MLX; rebuild it: {_REBUILD}")
    return _Loaded(module)


def _obstacle() -> str | None:
    """The reason not to load the module, or None. Built for another version of MLX, it could crash the process."""
    if os.environ.get("MLXINFER_CPU_KERNELS") == "0":
        return _OFF
    try:
        note = json.loads((Path(__file__).parent / BUILD_NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return _NOT_BUILT
    if "failed" in note:
        return f"not built: {note['failed']}"
    import mlx.core as mx

    installed = getattr(mx, "__version__", "unknown")  # importlib.metadata says the same, and is slow to import
    if note.get("mlx") != installed:
        return f"built for mlx {note.get('mlx')}, but {installed} is installed; rebuild it: {_REBUILD}"
    return None


def _no_isa(module: ModuleType) -> str:
    """The reason why a module has no instruction set that may be used: copied from another machine, or for a lower one asked for."""
    wanted, sets = os.environ.get("MLXINFER_CPU_ISA"), " and ".join(module.compiled_isas())
    if module.machine_isa() in module.compiled_isas():
        return f"compiled for {sets} only, not for MLXINFER_CPU_ISA={wanted}; MLXINFER_ALL_ISAS=1 {_REBUILD}"
    return f"compiled for {sets}, which this processor lacks (it has {module.machine_isa()}); rebuild it: {_REBUILD}"


def available() -> bool:
    """True if the operations of this package can be called."""
    return _loaded().module is not None


def in_use() -> bool:
    """True if the operations can be called and MLX computes on the CPU."""
    if not available():
        return False
    import mlx.core as mx

    return mx.default_device().type == mx.DeviceType.cpu


def status() -> str:
    """One line for the user: the kernels in use, or the reason why they are missing and the cost."""
    found = _loaded()
    if found.module is None:
        return f"CPU kernels: {found.problem}; {_COST}"
    return f"CPU kernels: {isa_name()}{_compiled()}, {_plural(thread_count(), 'thread')}{_ignored_setting()}{_age()}"


def _compiled() -> str:
    """The instruction sets that the module has, and the cost if this processor has a better one; empty for a module that does not say."""
    if not hasattr(_loaded().module, "compiled_isas"):
        return ""
    sets = native.compiled_isas()
    told = "the only instruction set compiled" if len(sets) == 1 else f"compiled: {', '.join(sets)}"
    if native.machine_isa() in sets:
        return f" ({told})"
    return f" ({told}; this processor has {native.machine_isa()}, which is faster: {_REBUILD})"


def missing_lines() -> list[str]:
    """A note for a user whose kernels do not fit the processor or MLX, or could not be built; none where nobody built or wants them."""
    return [] if _loaded().problem in (None, _OFF, _NOT_BUILT) else [status()]


def isa_name() -> str:
    """The instruction set in use: "avx512", "avx2", "i8mm", "dotprod" or "portable"."""
    return native.isa_name()


def thread_count() -> int:
    """Threads that compute: `MLXINFER_THREADS`, or the number of CPUs that the process may use."""
    return native.thread_count()


class _LazyModule:
    """The compiled module, loaded at the first access. Raises RuntimeError with `status()` if it is missing."""

    def __getattr__(self, name: str) -> Any:
        module = _loaded().module
        if module is None:
            raise RuntimeError(status())
        value = getattr(module, name)
        setattr(self, name, value)  # later accesses do not come here
        return value


if not TYPE_CHECKING:
    native = _LazyModule()


def _age() -> str:
    """The cost of a module older than this version, which runs without the operations that it lacks; empty if it is current."""
    costs = []
    if getattr(_loaded().module, "instructions_version", 0) != INSTRUCTIONS_VERSION:
        costs.append("blocks run operation by operation, which is slower")
    if not getattr(_loaded().module, "packs_float8", False):
        costs.append("8-bit floats with float scales are unpacked, to four times their size")
    if not hasattr(_loaded().module, "patch_attention"):
        costs.append("images take several times as long")
    return f"; the module is older than this version, and {', and '.join(costs)}; rebuild it: {_REBUILD}" if costs else ""


def _ignored_setting() -> str:
    wanted = os.environ.get("MLXINFER_THREADS")
    if wanted is None or (wanted.strip().isascii() and wanted.strip().isdigit() and 1 <= int(wanted) <= 256):
        return ""
    return f" (MLXINFER_THREADS={wanted!r} is not a number from 1 to 256 and is ignored)"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
