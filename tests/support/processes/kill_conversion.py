"""Runs a conversion that kills itself: `python -m support.processes.kill_conversion SRC DST WHERE COUNT OPTIONS`.

WHERE is the place, COUNT the number of passes before.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxinfer.convert import convert
from mlxinfer.convert.write import destination, journal, writer

PLACES: dict[str, tuple[Any, str]] = {
    "data": (writer, "_write_at"),
    "recorded": (journal.Journal, "record"),
    "line": (journal.os, "write"),
    "publish": (destination, "_publish"),
    "clean": (destination, "_delete"),
}


def die_at(place: str, count: int) -> None:
    """`data` and `line`: after half of the bytes are written; `recorded`: before a unit is noted; the others: before the step."""
    owner, name = PLACES[place]
    original: Callable[..., Any] = getattr(owner, name)
    left = count

    def replaced(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left >= 0:
            return original(*args, **kwargs)
        if place == "data":
            original(args[0], args[1][: len(args[1]) // 2], *args[2:])
        if place == "line":
            original(args[0], args[1][: len(args[1]) // 2])
        return os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, replaced)


if __name__ == "__main__":
    source, target, place, count, options = sys.argv[1:]
    die_at(place, int(count))
    convert(Path(source), Path(target), **json.loads(options))
