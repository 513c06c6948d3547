"""How long steps take, as measured: what the pace of prompts and the length of drafts go by."""

from __future__ import annotations

from bisect import bisect_left, insort

_SLOWEST = 0.1
"""Weight of a new measurement among many."""
_OUTLIER = 2.0
"""A measurement counts as at most so many times the average: a hiccup fades, a change for good is believed after a few steps."""


class Curve:
    """Seconds by a number of rows, averaged exponentially within classes of sizes, eight to an octave."""

    def __init__(self, *, through_zero: bool = False, memory: int | None = None) -> None:
        """`through_zero`: no rows take no time. `memory`: a size that was not among so many measurements is forgotten."""
        self._origin = through_zero
        self._memory = memory
        self._adds = 0
        self._stamps: dict[int, int] = {}
        self._points: dict[int, tuple[float, float, int]] = {}
        self._classes: list[int] = []
        self._line: tuple[list[float], list[float]] | None = None

    def add(self, rows: int, seconds: float, *, scale: float = 0.0) -> None:
        """`scale`: what is never an outlier."""
        key = _class(rows)
        self._line = None
        self._adds += 1
        self._stamps[key] = self._adds
        if self._memory and self._adds % self._memory == 0:
            self._forget(self._adds - self._memory)
        point = self._points.get(key)
        if point is None:
            if scale and (expected := self.at(rows)) is not None:
                seconds = min(seconds, max(expected, scale) * _OUTLIER)
            insort(self._classes, key)
            self._points[key] = (rows, seconds, 1)
            return
        size, mean, count = point
        if count < 3 and seconds < mean / _OUTLIER:
            # The first steps of a size may have waited for something that happens once, such as a compiler.
            self._points[key] = (rows, seconds, 1)
            return
        weight = max(1 / (count + 1), _SLOWEST)
        seconds = min(seconds, max(mean, scale) * _OUTLIER)
        self._points[key] = (size + weight * (rows - size), mean + weight * (seconds - mean), count + 1)

    def knows(self, rows: int) -> bool:
        return _class(rows) in self._points

    @property
    def largest(self) -> int:
        """Rows of the largest size measured; 0 if there is none."""
        return round(self._points[self._classes[-1]][0]) if self._classes else 0

    @property
    def smallest(self) -> int:
        return round(self._points[self._classes[0]][0]) if self._classes else 0

    def _forget(self, before: int) -> None:
        for key in [k for k in self._points if self._stamps[k] <= before]:
            del self._points[key]
            self._classes.remove(key)

    def at(self, rows: int) -> float | None:
        """As measured, or never falling between what was; beyond that, along the last two sizes."""
        point = self._points.get(_class(rows))
        if point is not None and round(point[0]) == rows:
            return point[1]
        if not self._points:
            return None
        xs, ys = self._line or self._rising()
        place = bisect_left(xs, rows)
        if place == 0:
            return ys[0]
        if place < len(xs):
            x0, x1, y0, y1 = xs[place - 1], xs[place], ys[place - 1], ys[place]
            return y0 + (y1 - y0) * (rows - x0) / (x1 - x0)
        slope = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]) if len(xs) > 1 else ys[0] / xs[0]
        return ys[-1] + slope * (rows - xs[-1])

    def _rising(self) -> tuple[list[float], list[float]]:
        xs, ys = ([0.0], [0.0]) if self._origin else ([], [])
        for key in self._classes:
            size, seconds, _ = self._points[key]
            if not xs or size > xs[-1]:
                xs.append(size)
                ys.append(max(seconds, ys[-1]) if ys else seconds)
        self._line = xs, ys
        return xs, ys


class StepTimes:
    """Seconds of a step, by its rows that bring answers on (one for each, and drafts) and the rows of prompts beside them.

    The latter are what they add to the time of the step without them.
    """

    def __init__(self) -> None:
        self.alone = Curve()
        self.extra = Curve(through_zero=True, memory=128)
        self.prompts = Curve()
        """Steps in which nothing but prompts was read."""

    def observe(self, rows: int, prefill_rows: int, seconds: float) -> None:
        if not prefill_rows:
            self.alone.add(rows, seconds)
        elif not rows:
            self.prompts.add(prefill_rows, seconds)
        else:
            alone = self.alone.at(rows)
            if alone is not None:
                self.extra.add(prefill_rows, max(seconds - alone, 0.0), scale=alone / 2)

    def estimate(self, rows: int, prefill_rows: int = 0) -> float | None:
        """Seconds; None as long as nothing like it was measured."""
        if not rows:
            return self.prompts.at(prefill_rows)
        alone = self.alone.at(rows)
        if not prefill_rows or alone is None:
            return alone
        extra = self.extra.at(prefill_rows)
        return None if extra is None else alone + extra


def _class(rows: int) -> int:
    """Sizes up to 16 each, then eight to an octave."""
    if rows <= 16:
        return rows
    shift = rows.bit_length() - 4
    return shift * 16 + (rows >> shift)
