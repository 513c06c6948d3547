"""Command that installs packages into the running environment.

An extra is spelled by its packages, because this project is not on a package index.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def install_line(packages: str) -> str:
    """Return the command for these packages, such as "pip install pandas"; `packages` may start with pip options."""
    here = Path(sys.prefix)
    if (here / "uv-receipt.toml").exists():  # uv tool install
        return f"uv pip install --python {here} {packages}"
    if (here / "pipx_metadata.json").exists():
        return f"pipx runpip {here.name} install {packages}"
    pip = shutil.which("pip")
    if pip is not None and Path(pip).parent == here / "bin":
        return f"pip install {packages}"
    return f"{sys.executable} -m pip install {packages}"
