"""Metal kernels where a test wants them to run: on the GPU if there is one, else in the emulator, under a sanitizer in any case there."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest

from mlxinfer.kernels_metal import emulator
from mlxinfer.kernels_metal.executors import run_with

needs_emulator = pytest.mark.emulator
"""For tests that run kernels; those that need no more than answers run on a GPU as well."""


def on_gpu() -> bool:
    """Return True if kernels run here by default: on a GPU, or with `make mac-like`."""
    return mx.metal.is_available() or mx.cuda.is_available() or os.environ.get("MLXINFER_KERNELS") == "emulator"


@contextmanager
def emulated(mode: str | None = None, order: str | None = None, seed: int | None = None) -> Iterator[None]:
    """Launches run in the emulator; with no mode and no order to be in, on the GPU where there is one. Raises `emulator.Unavailable`,
    which skips the test, where a mode or an order is asked for that cannot be had."""
    if on_gpu() and mode is order is seed is None:
        yield
        return
    if lack := emulator.why_not(mode or "fast"):
        raise emulator.Unavailable(lack)
    with run_with(emulator.metal_kernel), emulator.settings(mode=mode, order=order, seed=seed):
        yield


@contextmanager
def counting(counts: Counter[Any], key: Callable[[str, Mapping[str, Any]], Any] = lambda name, launch: name) -> Iterator[None]:
    """Run kernels in the emulator, and count launches by `key` of the kernel's name and the launch's arguments; None is not counted."""

    def maker(*, name: str, **source: Any) -> Callable[..., list[mx.array]]:
        kernel = emulator.metal_kernel(name=name, **source)

        def call(**launch: Any) -> list[mx.array]:
            if (counted := key(name, launch)) is not None:
                counts[counted] += 1
            return kernel(**launch)

        return call

    with run_with(maker):
        yield
