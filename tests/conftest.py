"""Order and conditions of the whole suite: quick tests first, and what this machine lacks is skipped with its reason."""

from __future__ import annotations

import importlib.util
import os
import signal

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run, and no judgement of how long one takes: machines are slow and shared.
settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")

# Nothing is written beside what the user has; tests of packed copies switch them on, in a directory of their own.
os.environ["MLXINFER_PACKED_GB"] = "0"

# A shell's background jobs ignore Ctrl-C, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _missing() -> dict[str, str]:
    """Marker -> why its tests cannot run here."""
    import mlx.core as mx

    from mlxinfer.kernels_metal import emulator

    reasons = {}
    if not mx.metal.is_available():
        reasons["metal"] = "no Apple GPU"
    if not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        reasons["torch"] = "torch and transformers are not installed (make test EXTRAS=dev)"
    if why_not := emulator.why_not():
        reasons["emulator"] = f"Metal kernels cannot be run here: {why_not}"
    return reasons


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = _missing()
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
    items.sort(key=lambda item: sum(item.get_closest_marker(name) is not None for name in ("model", "torch")))
