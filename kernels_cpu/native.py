"""Finds and loads the compiled module."""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from .interface import Native

BUILD_NOTE = "_native.json"
"""Written by setup.py next to the module: `{"mlx": version}`, or `{"failed": reason}`."""

_COST = "matrices and attention then run on MLX's own CPU operations, some thirty times slower"
_REBUILD = "pip install --force-reinstall --no-deps --no-cache-dir mlxinfer"


@dataclass(frozen=True, slots=True)
class _Native:
    module: Native | None
    problem: str | None = None


@cache
def _native() -> _Native:
    problem = _unfit()
    if problem is not None:
        return _Native(None, problem)
    try:
        import mlx.core  # brings libmlx, which the module refers to

        module = cast("Native", importlib.import_module("._native", __package__))
        module.silu_multiply(mlx.core.zeros((0,)), mlx.core.zeros((0,)))
    except ImportError as error:
        return _Native(None, f"the native module does not load ({error}); rebuild it: {_REBUILD}")
    except TypeError:
        return _Native(None, f"the native module was built with another nanobind than MLX; rebuild it: {_REBUILD}")
    return _Native(module)


def _unfit() -> str | None:
    """Why the module must not be loaded, None if it may: built for another version of MLX, it could crash the process."""
    if os.environ.get("MLXINFER_CPU_KERNELS") == "0":
        return "switched off by MLXINFER_CPU_KERNELS=0"
    try:
        note = json.loads((Path(__file__).parent / BUILD_NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "not built (on Linux pip install does so where a C++ compiler is present)"
    if "failed" in note:
        return f"not built: {note['failed']}"
    import mlx.core as mx

    installed = getattr(mx, "__version__", "unknown")  # importlib.metadata says the same, and is slow to import
    if note.get("mlx") != installed:
        return f"built for mlx {note.get('mlx')}, but {installed} is installed; rebuild it: {_REBUILD}"
    return None


def available() -> bool:
    """Whether the operations of this package can be called."""
    return _native().module is not None


def in_use() -> bool:
    """Whether the operations can be called and MLX computes on the CPU."""
    if not available():
        return False
    import mlx.core as mx

    return mx.default_device().type == mx.DeviceType.cpu


def status() -> str:
    """One line for the user: what is in use, or why it is not and what that costs."""
    found = _native()
    if found.module is None:
        return f"CPU kernels: {found.problem}; {_COST}"
    return f"CPU kernels: {isa_name()}, {_plural(thread_count(), 'thread')}{_ignored_setting()}"


def isa_name() -> str:
    """The instruction set in use: "avx512", "avx2", "i8mm", "dotprod" or "portable"."""
    return native().isa_name()


def thread_count() -> int:
    """Threads that compute: `MLXINFER_THREADS`, or the number of CPUs that the process may use."""
    return native().thread_count()


def native() -> Native:
    """The compiled module. Raises RuntimeError with `status()` if it is missing."""
    found = _native()
    if found.module is None:
        raise RuntimeError(status())
    return found.module


def _ignored_setting() -> str:
    wanted = os.environ.get("MLXINFER_THREADS")
    if wanted is None or (wanted.strip().isascii() and wanted.strip().isdigit() and 1 <= int(wanted) <= 256):
        return ""
    return f" (MLXINFER_THREADS={wanted!r} is not a number from 1 to 256 and is ignored)"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
