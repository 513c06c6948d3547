"""Folders that `convert` wrote, wherever they are: their names are remembered in the cache folder."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from ...util.cache_dir import cache_dir


def remember_converted(folder: Path) -> None:
    """Add a folder to those that `models list` shows, unless it is temporary. A list that cannot be written is left as it is."""
    known = [*converted_folders(), folder.absolute()]
    if Path(tempfile.gettempdir()).resolve() in folder.resolve().parents:
        return
    with suppress(OSError):
        cache_dir().mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=cache_dir(), prefix=".converted.")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.writelines(f"{path}\n" for path in dict.fromkeys(known))
        Path(name).replace(_list())


def converted_folders() -> list[Path]:
    """Remembered folders that still hold a model."""
    try:
        lines = _list().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    return [Path(line) for line in lines if line and (Path(line) / "config.json").is_file()]


def find_converted(name: str) -> Path | None:
    """Return the newest remembered folder of this name."""
    return next((folder for folder in reversed(converted_folders()) if folder.name == name), None)


def _list() -> Path:
    return cache_dir() / "converted.txt"
