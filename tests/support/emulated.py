"""Kernels in the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mlxinfer.kernels_metal import emulator
from mlxinfer.kernels_metal.executors import run_with

needs_emulator = pytest.mark.emulator


@contextmanager
def emulated(mode: str | None = None, order: str | None = None, seed: int | None = None) -> Iterator[None]:
    with run_with(emulator.metal_kernel), emulator.settings(mode=mode, order=order, seed=seed):
        yield
