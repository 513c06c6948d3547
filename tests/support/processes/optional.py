"""Libraries that only some tests need: those skip where they are missing, and say so."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest


class Later:
    """A module that is imported when something in it is first asked for: clients of servers take seconds, in each process that collects."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and name != "__path__":  # pytest looks for tests in it
            raise AttributeError(name)
        return getattr(import_module(self._name), name)


def needs(name: str) -> Any:
    """The module, imported once it is used, or a skip: of the test that asks, and of the whole file where it is asked for at the top."""
    top = name.partition(".")[0]
    if find_spec(top) is None:
        pytest.skip(f"{top} is not installed (make test installs it)", allow_module_level=True)
    return Later(name)
