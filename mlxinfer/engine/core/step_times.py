"""Predicts step durations from collected steps, for the prefill budget and for draft lengths."""

from __future__ import annotations

from bisect import bisect_left, insort

_OUTLIER = 2.0
"""A measurement counts as at most this many times the average: a hiccup fades, a lasting change is learnt within a few steps."""
_KNOWN = 4
"""Measurements of a size after which it indicates the machine's present speed."""
_FEW = 8
"""Measurements of a size that weigh the same: the first ones of a process are slow and should fade."""
_DRIFT = 0.02
"""Weight of a further measurement of a size, relative to the other sizes."""
_SPEED = 0.2
"""Exponent with which a known size changes the machine's speed."""
_WAIT = 1.1
"""Assumed ratio of a step that waits for the one before to one that does not."""
_SLOPE = 0.1
"""Assumed relative cost of a further row."""
_PROMPT_MEMORY = 128
"""Measurements of prompts after which a size without one is forgotten: reading slows down as prompts grow."""
_LONG = 128
"""Least rows of a step that shows the time per row: shorter ones are bound by reading the weights."""
_TURN = 0.1
"""Weight of a further measurement of the draft model's turns."""
_SLOWER = 0.5
"""Weight of a measurement slower than the average: the first may have waited for a compiler. Faster ones count fully."""


class Curve:
    """Seconds by number of rows, averaged exponentially within classes of sizes, eight to an octave above 16."""

    def __init__(
        self, *, through_zero: bool = False, memory: int | None = None, few: int = 10, slowest: float = 0.1, slope: float = 0.0
    ) -> None:
        """`through_zero`: no rows take no time. `memory`: a size without a measurement among the last `memory` ones is forgotten. The
        first `few` measurements of a size weigh the same, later ones `slowest`. `slope`: relative cost of a row beyond the largest size; 0
        continues the line of the last two sizes."""
        self._origin = through_zero
        self._memory = memory
        self._few = few
        self._slowest = slowest
        self._slope = slope
        self._adds = 0
        self._stamps: dict[int, int] = {}
        self._points: dict[int, tuple[float, float, int]] = {}
        self._classes: list[int] = []
        self._line: tuple[list[float], list[float]] | None = None

    def add(self, rows: int, seconds: float, *, scale: float = 0.0) -> None:
        """Add a measurement. Less than `scale` is never an outlier."""
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
            # The first steps of a size may have waited for a compiler.
            self._points[key] = (rows, seconds, 1)
            return
        weight = 1 / (count + 1) if count < self._few else self._slowest
        seconds = min(seconds, max(mean, scale) * _OUTLIER)
        self._points[key] = (size + weight * (rows - size), mean + weight * (seconds - mean), count + 1)

    def knows(self, rows: int) -> bool:
        """True if this size was measured."""
        return _class(rows) in self._points

    def known(self, rows: int, count: int) -> float | None:
        """The average of this size if it was measured more than `count` times, otherwise None."""
        point = self._points.get(_class(rows))
        return point[1] if point is not None and point[2] > count else None

    def over(self, other: Curve, factor: float) -> Curve:
        """This curve, with `other` times `factor` for sizes that were not measured here."""
        both = Curve(slope=self._slope)
        both._points = {key: (size, seconds * factor, count) for key, (size, seconds, count) in other._points.items()} | self._points
        both._classes = sorted(both._points)
        return both

    @property
    def largest(self) -> int:
        """Rows of the largest size measured; 0 if there is none."""
        return round(self._points[self._classes[-1]][0]) if self._classes else 0

    @property
    def smallest(self) -> int:
        """Rows of the smallest size measured; 0 if there is none."""
        return round(self._points[self._classes[0]][0]) if self._classes else 0

    def _forget(self, before: int) -> None:
        for key in [k for k in self._points if self._stamps[k] <= before]:
            del self._points[key]
            self._classes.remove(key)

    def at(self, rows: int) -> float | None:
        """Seconds for these rows: measured, or interpolated without falling; None without measurements."""
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
        if self._slope:
            return ys[-1] * (1 + self._slope * (rows - xs[-1]))
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


def _class(rows: int) -> int:
    """The class of a size: each size up to 16, then eight classes per octave."""
    if rows <= 16:
        return rows
    shift = rows.bit_length() - 4
    return shift * 16 + (rows >> shift)


class StepTimes:
    """Seconds of steps without prompts by their rows (one for each answer, and drafts), and the seconds that prompt rows add.

    Times of steps without prompts are stored as multiples of `unit`, so that all of them follow a change of the machine's speed.
    """

    def __init__(self) -> None:
        self.unit = 0.0
        """Seconds of the first measured size at the present speed; 0 before a measurement."""
        self.prompts = Curve(through_zero=True, memory=_PROMPT_MEMORY)
        """Seconds that prompt rows add to a step with answers."""
        self.reading = 0.0
        """Seconds per row in steps without answers; 0 before one was measured."""
        self.turn = 0.0
        """Seconds of one turn of the draft model, in addition to `round`; 0 before one was measured."""
        self._turn_mean, self._turns = 0.0, 0
        self._ahead = Curve(few=_FEW, slowest=_DRIFT, slope=_SLOPE)
        self._waiting = Curve(few=_FEW, slowest=_DRIFT, slope=_SLOPE)
        self._drafting = Curve(few=_FEW, slowest=_DRIFT, slope=_SLOPE)
        self._rounds: Curve | None = None

    def observe(self, rows: int, prefill_rows: int, seconds: float, *, waited: bool = False, turns: int = 0) -> None:
        """Learn from a step with `rows` rows of answers and `prefill_rows` of prompts. `waited`: it was submitted after the step before was
        collected. `turns`: runs of the draft model for it."""
        if prefill_rows and not rows:
            self._read(prefill_rows, seconds)
        elif prefill_rows:
            alone = self.alone(rows)
            if alone is not None:
                self.prompts.add(prefill_rows, max(seconds - alone, 0.0), scale=alone / 2)
        elif rows:
            if turns:
                self._turn(rows, turns, seconds)
            self._learn(self._drafting if turns else self._waiting if waited else self._ahead, rows, seconds)

    def _turn(self, rows: int, turns: int, seconds: float) -> None:
        # Negative measurements count too: without them, noise would make turns look long.
        round_ = self.round(rows)
        found = min(seconds - round_, max(_OUTLIER * turns * self.turn, round_)) / turns
        self._turns += 1
        self._turn_mean += max(1 / self._turns, _TURN) * (found - self._turn_mean)
        self.turn = max(self._turn_mean, 0.0)

    def _read(self, rows: int, seconds: float) -> None:
        if rows >= _LONG:
            change = seconds / rows - self.reading
            self.reading += change * _SLOWER if self.reading and change > 0 else change

    def _learn(self, sizes: Curve, rows: int, seconds: float) -> None:
        self.unit = self.unit or seconds or 1.0
        self._rounds = None
        share = sizes.known(rows, _KNOWN)
        if share:
            # A single slow step, while the machine was busy otherwise, must not count for long.
            change = min(max(seconds / (share * self.unit), 1 / _OUTLIER), _OUTLIER)
            self.unit *= change**_SPEED
            seconds = change * share * self.unit
        sizes.add(rows, seconds / self.unit)

    def knows(self, rows: int) -> bool:
        """True if steps of this size without prompts were measured, or smaller and larger ones."""
        sizes = (self._ahead, self._waiting, self._drafting)
        if any(curve.knows(rows) for curve in sizes):
            return True
        return any(0 < curve.smallest < rows for curve in sizes) and any(rows < curve.largest for curve in sizes)

    def alone(self, rows: int) -> float | None:
        """Seconds of a usual step without prompts; None if none was measured."""
        sizes = (self._ahead, self._waiting, self._drafting)
        share = next((curve for curve in sizes if curve.knows(rows)), self._ahead).at(rows)
        if share is None:
            share = next((share for curve in sizes if (share := curve.at(rows)) is not None), None)
        return None if share is None else self.unit * share

    def step(self, rows: int) -> float:
        """Seconds of a step submitted before the previous one was collected; 0 if none was measured."""
        return self.unit * (self._ahead.at(rows) or 0.0)

    def round(self, rows: int) -> float:
        """Seconds of a step that waits for the previous one; 0 if nothing was measured."""
        if self._rounds is None:
            self._rounds = self._waiting.over(self._ahead, _WAIT)
        return self.unit * (self._rounds.at(rows) or 0.0)
