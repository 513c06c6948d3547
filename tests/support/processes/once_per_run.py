"""Results that tests share, whichever of the run's processes they are in."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from typing import Any

import pytest


def once_per_run(directories: pytest.TempPathFactory, name: str, make: Callable[[], Any]) -> Any:
    """Return the JSON value of `make`: the first process of the run computes it, and the others wait."""
    base = directories.getbasetemp()
    # A process of xdist has a folder in the run's; the environment also tells pytest so where a test of such a process has started it.
    place = (base.parent if base.name.startswith("popen-") else base) / f"{name}.json"
    with place.with_suffix(".lock").open("w") as alone:
        fcntl.flock(alone, fcntl.LOCK_EX)
        if not place.exists():
            made = place.with_suffix(".making")  # a process that is ended while it writes leaves nothing that is taken for a result
            made.write_text(json.dumps(make()), encoding="utf-8")
            made.rename(place)
    return json.loads(place.read_text(encoding="utf-8"))
