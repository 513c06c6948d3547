"""Towers in `mmproj` files, beside the GGUF file of a text model."""

from __future__ import annotations

from pathlib import Path

from ....errors import CheckpointError
from .checkpoint import MMProjCheckpoint

__all__ = ["MMProjCheckpoint", "find_mmproj"]


def find_mmproj(model: Path) -> Path | None:
    """Return the only `*mmproj*.gguf` in the directory of a GGUF file; None without one. Raises `CheckpointError` for several."""
    found = sorted(path for path in model.parent.glob("*.gguf") if "mmproj" in path.name.lower() and path != model)
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise CheckpointError(f"{model.parent} has several mmproj files ({names}): name one with --mmproj FILE")
    return found[0] if found else None
