"""Speed of a kernel compared with MLX's operations, measured on this machine."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import mlx.core as mx

from .kernel_trial import Speed

Clock = Callable[[], float]
Step = Callable[[mx.array, int], mx.array]
"""Computes an array from one of the same shape and dtype, and from the number of the step."""

_ROUNDS = 4
_STALL = 2.0
"""Factor of a stall: a kernel's slowdown since its first round, without one of MLX's."""
_MOST_STEPS = 1 << 13
"""Maximum steps of a graph."""


def compare(ours: Step, theirs: Step, x: mx.array, *, steps: int = 1, seconds: float, clock: Clock = perf_counter) -> Speed:
    """Measure `ours` compared with `theirs`, for about `seconds` in total. A pass has steps 0 to `steps - 1`, each of which computes the
    input of the next, from `x` on. `Speed.seconds` is the time of one step of ours.

    Graphs are built before the clock starts: a model's next step is built while the device computes the previous one.
    """
    for step in (ours, theirs):
        _time(step, x, steps, 1, clock)  # compiles, and raises the clock of the GPU
    once = _time(theirs, x, steps, 1, clock)
    passes = min(max(int(seconds / (2 * _ROUNDS) / max(once, 1e-6)), 1), max(_MOST_STEPS // steps, 1))
    times = [(_time(ours, x, steps, passes, clock), _time(theirs, x, steps, passes, clock)) for _ in range(_ROUNDS)]
    own, other = [t[0] for t in times], [t[1] for t in times]
    stalled = own[-1] > _STALL * own[0] and other[-1] <= _STALL * other[0]
    return Speed(sum(other) / max(sum(own), 1e-9), stalled, sum(own) / (_ROUNDS * passes * steps))


def _time(step: Step, x: mx.array, steps: int, passes: int, clock: Clock) -> float:
    """Return the seconds that the device takes for `passes` passes, one step after another."""
    for _ in range(passes):
        for number in range(steps):
            x = step(x, number)
    start = clock()
    mx.eval(x)
    return clock() - start
