"""Speed of a kernel compared with MLX's operations, measured on this machine."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter

import mlx.core as mx

from .kernel_trial import Speed

Clock = Callable[[], float]
Step = Callable[[mx.array, int], mx.array]
"""Computes an array from one of the same shape and dtype, and from the number of the step."""

SECONDS = 0.05
"""Usual duration of a comparison, once per machine and kind."""
_ROUNDS = 4
_STALL = 2.0
"""Factor of a stall: a kernel's slowdown since its first round, without one of MLX's."""
_MOST_STEPS, _FIRST_STEPS = 1 << 13, 4
"""Maximum steps of a graph, and the least number for a first estimate of their time."""
_BUSY_SECONDS, _BUSY_NUMBERS, _MOST_PAIRS = 60e-6, 1 << 20, 16
"""Duration of the products after a step, which exceeds the host's work for a step; numbers of a matrix, and maximum pairs of products."""


def compare(
    ours: Step, theirs: Step, x: mx.array, *, steps: int = 1, busy: bool = False, seconds: float = SECONDS, clock: Clock | None = None
) -> Speed:
    """Measure `ours` compared with `theirs`, for about `seconds` in total. A pass has steps 0 to `steps - 1`, each of which computes the
    input of the next, from `x` on. `Speed.seconds` is the time of one step of ours.

    Graphs are built before the clock starts: a model's next step is built while the device computes the previous one. The host still
    encodes launches while the clock runs. A kernel that takes less time than that needs `busy`: products follow each step, as in a model,
    and keep the device behind the host. Both times include them.
    """
    clock = clock or perf_counter
    if busy:
        after = _products(x, clock)
        ours, theirs = _followed(ours, after), _followed(theirs, after)
    for step in (ours, theirs):
        _time(step, x, steps, 1, clock)  # compiles, and raises the clock of the GPU
    first = max(_FIRST_STEPS // steps, 1)
    once = max(_time(step, x, steps, first, clock) for step in (ours, theirs)) / first
    passes = min(max(int(seconds / (2 * _ROUNDS) / max(once, 1e-6)), 1), max(_MOST_STEPS // steps, 1))
    times = [(_time(ours, x, steps, passes, clock), _time(theirs, x, steps, passes, clock)) for _ in range(_ROUNDS)]
    own, other = [t[0] for t in times], [t[1] for t in times]
    stalled = own[-1] > _STALL * own[0] and other[-1] <= _STALL * other[0]
    return Speed(sum(other) / max(sum(own), 1e-9), stalled, sum(own) / (_ROUNDS * passes * steps))


def _followed(step: Step, after: Callable[[mx.array], mx.array]) -> Step:
    return lambda x, number: after(step(x, number))


def _products(x: mx.array, clock: Clock) -> Callable[[mx.array], mx.array]:
    """Return products of an array like x, one after another, that take the device about `_BUSY_SECONDS`. The result is of its shape."""
    wide = max(_BUSY_NUMBERS // x.size, 1)
    into, out = mx.zeros((x.size, wide), x.dtype), mx.zeros((wide, x.size), x.dtype)
    mx.eval(into, out)

    def repeated(y: mx.array, count: int) -> mx.array:
        row = y.reshape(1, -1)
        for _ in range(count):
            row = row @ into @ out
        return row.reshape(y.shape)

    def pairs(y: mx.array, _: int) -> mx.array:
        return repeated(y, _MOST_PAIRS)

    _time(pairs, x, 1, 1, clock)
    one = _time(pairs, x, 1, 1, clock) / _MOST_PAIRS
    count = min(math.ceil(_BUSY_SECONDS / max(one, 1e-9)), _MOST_PAIRS)
    return lambda y: repeated(y, count)


def _time(step: Step, x: mx.array, steps: int, passes: int, clock: Clock) -> float:
    """Return the seconds that the device takes for `passes` passes, one step after another."""
    for _ in range(passes):
        for number in range(steps):
            x = step(x, number)
    start = clock()
    mx.eval(x)
    return clock() - start
