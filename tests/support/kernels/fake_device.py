"""A device whose time is known, for tests of choices by speed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import mlx.core as mx
import pytest

from mlxinfer.kernels_metal import executors, kernel_speed

T = TypeVar("T")


class Device:
    """A device that computes in `mx.eval` only, and its host."""

    def __init__(self) -> None:
        self.now, self.waiting, self.evaluations = 0.0, 0.0, 0

    def clock(self) -> float:
        return self.now

    def product(self, seconds: Callable[[float], float], host: float) -> Callable[[mx.array, int], mx.array]:
        def call(x: mx.array, number: int) -> mx.array:
            self.now += host
            self.waiting += seconds(self.now)
            return x

        return call

    def eval(self, *_: object) -> None:
        self.now += self.waiting
        self.waiting = 0.0
        self.evaluations += 1

    def takes(self, seconds: float, answer: Callable[..., T]) -> Callable[..., T]:
        """Return the function `answer`, for whose result the device computes for this time."""

        def call(*arguments: object, **named: object) -> T:
            self.waiting += seconds
            return answer(*arguments, **named)

        return call


def pretend_to_measure(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Until the end of the test, speeds are measured as on a GPU, on the device that is returned. It computes nothing."""
    device = Device()
    monkeypatch.setattr(mx, "eval", device.eval)
    monkeypatch.setattr(kernel_speed, "perf_counter", device.clock)
    monkeypatch.setattr(executors, "measurable", lambda: True)
    return device
