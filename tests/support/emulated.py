"""Kernels in the emulator, where it can run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mlxinfer.kernels_metal import emulator
from mlxinfer.kernels_metal.executors import run_with

needs_emulator = pytest.mark.skipif(not emulator.available(), reason=f"the emulator cannot run: {emulator.why_not()}")


@contextmanager
def emulated(mode: str | None = None, order: str | None = None, seed: int | None = None) -> Iterator[None]:
    with run_with(emulator.metal_kernel), emulator.settings(mode=mode, order=order, seed=seed):
        yield
