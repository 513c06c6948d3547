"""Results that tests share, whichever of the run's processes they are in."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from typing import Any

import pytest


def once_per_run(directories: pytest.TempPathFactory, name: str, make: Callable[[], Any]) -> Any:
    """What `make` returns, which JSON has to hold: the first process computes it, the others wait for it."""
    base = directories.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"{name}.json"
    with place.with_suffix(".lock").open("w") as alone:
        fcntl.flock(alone, fcntl.LOCK_EX)
        if not place.exists():
            place.write_text(json.dumps(make()), encoding="utf-8")
    return json.loads(place.read_text(encoding="utf-8"))
