"""Imported by every Python process that `make mac-like` starts, before anything else: what differs on a Mac and can be had on Linux too."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_ROOT = Path(__file__).parents[4]
_OURS = tuple(f"{_ROOT / folder}{os.sep}" for folder in ("mlxinfer", "benchmarks"))
_LIBRARY = os.path.dirname(os.__file__) + os.sep


class _Device(Loader):
    """`mlxinfer.util.device` of a machine with an Apple GPU, as far as numbers depend on it."""

    def __init__(self, usual: Loader) -> None:
        self._usual = usual

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._usual.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._usual.exec_module(module)
        module.default_dtype = lambda: module.mx.bfloat16  # type: ignore[attr-defined]


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == "mlxinfer.util.device" else None
        if spec and spec.loader:
            spec.loader = _Device(spec.loader)
        return spec


def _no_proc(event: str, arguments: tuple[object, ...]) -> None:
    """The package and its benchmarks find no /proc; psutil, for example, asks a Mac otherwise."""
    if event not in ("open", "os.listdir", "os.scandir") or not isinstance(arguments[0], str) or not arguments[0].startswith("/proc"):
        return
    frame = sys._getframe(1)
    while frame.f_back and (frame.f_code.co_filename.startswith((_LIBRARY, "<")) and "site-packages" not in frame.f_code.co_filename):
        frame = frame.f_back
    file = frame.f_code.co_filename
    if file.startswith(_OURS) and "/emulator/" not in file:  # which stands in for the GPU
        raise FileNotFoundError(2, "No such file or directory", arguments[0])


sys.meta_path.insert(0, _Finder())
sys.addaudithook(_no_proc)
