"""A plugin for pytest (`-p support.processes.mac_like`) that has tests run under a Mac's conditions, as far as Linux can have them.

Without CPU kernels and with a GPU's default dtype; without /proc; temporary files in a directory whose name is as long as a Mac's; 256 open
files. Metal kernels run in the emulator, as if that were the GPU. All of this reaches the processes that tests start.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

_SITE = Path(__file__).parent / "mac"
_OPEN_FILES = 256
_TEMPORARY = 56
"""Bytes of the name of a Mac's directory for temporary files: /private/var/folders/xx/<30 characters>/T"""

if "MLXINFER_MAC_LIKE" not in os.environ:  # not one of the processes that run tests for this one
    _folder = Path(tempfile.mkdtemp(prefix="mlx", dir="/tmp"))
    _long = _folder / "T".rjust(_TEMPORARY - len(str(_folder)) - 1, "_")
    _long.mkdir()
    _compiled = Path(tempfile.gettempdir(), "mlx")  # what MLX has compiled for CPUs lies there; a Mac's GPU has no use for it
    _compiled.mkdir(exist_ok=True)
    (_long / "mlx").symlink_to(_compiled)
    os.environ |= {
        "MLXINFER_MAC_LIKE": str(_folder),
        "MLXINFER_CPU_KERNELS": "0",
        "MLXINFER_KERNELS": "emulator",
        "TMPDIR": str(_long),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_SITE), os.environ.get("PYTHONPATH", "")])),
    }
    tempfile.tempdir = None
    resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
if "mlxinfer" in sys.modules:
    raise ImportError("support.processes.mac_like has to be loaded before what it changes")
if str(_SITE) not in sys.path:  # else Python has imported it already
    sys.path.insert(0, str(_SITE))
    sys.modules.pop("sitecustomize", None)
    import sitecustomize  # noqa: F401


def pytest_report_header() -> str:
    return f"as on a Mac: bfloat16, no CPU kernels, no /proc, {_OPEN_FILES} open files, temporary files in {os.environ['TMPDIR']}"


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["MLXINFER_MAC_LIKE"], ignore_errors=True)
