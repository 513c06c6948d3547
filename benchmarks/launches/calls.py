"""Measures the host's time for calls of MLX that the phantom GPU replaces.

A call only adds a node to a graph. Kernels are called within a trace, where MLX needs no GPU. The few operations that are one node on a GPU
and many on a CPU are assumed to cost as much as a quantized product, which has as many arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import thread_time
from typing import Any

import mlx.core as mx

_CALLS = 60
_metal_kernel, _quantized_matmul = mx.fast.metal_kernel, mx.quantized_matmul
CLOCK = 0.0
"""Seconds for reading the clock twice."""


def _least(call: Callable[[], object]) -> float:
    """Seconds of the fastest of several calls, without the clock's own time."""
    times = []
    for _ in range(_CALLS):
        start = thread_time()
        call()
        times.append(thread_time() - start)
    return min(times) - CLOCK


CLOCK = _least(lambda: None)


def operation() -> float:
    """Seconds of a call of an operation."""
    x, weight, scales = mx.zeros((8, 64)), mx.zeros((64, 8), mx.uint32), mx.zeros((64, 1))
    return _least(lambda: _quantized_matmul(x, weight, scales, scales, transpose=True, group_size=64, bits=4))


def compiled(function: Callable[..., Any], arguments: Sequence[mx.array]) -> float:
    """Seconds of a call of a compiled function."""
    return _least(lambda: function(*arguments))


def kernel(definition: dict[str, Any], arguments: Sequence[mx.array], launch: dict[str, Any]) -> float:
    """Seconds of a call of a Metal kernel. `definition` are the arguments of `mx.fast.metal_kernel`, `launch` those of a launch besides the
    arrays."""
    made: Any = _metal_kernel(**definition)
    found: list[float] = []

    def traced(*inputs: mx.array) -> Any:
        found.append(_least(lambda: made(inputs=list(inputs), **launch)))
        return made(inputs=list(inputs), **launch)

    mx.export_function(lambda _: None, traced, *arguments)
    return found[0]
