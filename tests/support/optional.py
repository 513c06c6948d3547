"""Libraries that only some tests need: those skip where they are missing, and say so."""

from __future__ import annotations

from typing import Any

import pytest


def needs(name: str) -> Any:
    """The module, or a skip: of the test that asks, and of the whole file where it is asked for at the top."""
    return pytest.importorskip(name, reason=f"{name.partition('.')[0]} is not installed (make test installs it)")
