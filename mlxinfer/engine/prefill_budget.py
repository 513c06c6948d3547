"""How much of the prompts is read beside running answers, so that these keep their share of the speed they have alone."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

from ..cache.pages import PAGE

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


class StepTimeModel:
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


_NEARLY_BEST = 0.9
"""The smallest chunk is taken that reads so much of what the best one reads in the same time: streams stay smooth."""
_FIRST_ROWS = 16
_MIXED_STEPS = 32
"""After so many steps with prompts there is one without, so that it stays known how long one takes."""
_RARE = 0.02
"""What a chunk costs is not known more exactly than to this part of a step."""


class PrefillBudget:
    """An account of seconds. A step in which answers get a token each pays in what that may cost, `t / share` where `t` is its time
    without prompts, and takes out what it did cost. Prompts are read from what is there, in chunks of the size that reads most for
    its cost, which may have to be saved up for. A balance below zero, after a misjudged step or a short prompt, is paid back first.
    """

    def __init__(self, times: StepTimeModel, *, share: float, max_step_s: float) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, not {share}")
        self.times = times
        self.share = share
        self.max_step_s = max_step_s
        self.balance = 0.0
        self._planned: deque[tuple[int, int, float]] = deque()
        self._target = 0.0
        self._explored = False
        self._mixed = 0

    def allowance(self, decode_rows: int, wanted: int, most: int, shortest: int = 0) -> int:
        """Rows of prompts for a step with `decode_rows` rows of answers, of the `wanted` that are left to read and at most `most`. The
        next prompt in line has `shortest` rows left: it may overdraw the account a little if that brings it to its end."""
        most = min(wanted, most)
        if not decode_rows or most <= 0:
            return max(most, 0)
        alone = self._alone(decode_rows)
        if alone is None:
            return 0
        limit = max(self.max_step_s - alone, alone)
        floor = alone * _RARE
        if not self.times.extra.largest:
            return self._first(alone, limit, most)
        chunk, cost = self._chunk(most, limit, floor)
        self._target = max(cost, 2 * alone * (1 / self.share - 1))
        self.balance = min(self.balance, self._target)
        if 0 < shortest <= most and self.balance >= 0:
            spare = self.balance + self.max_step_s / 4
            if self._cost(shortest, floor) <= min(spare, limit):
                return max(self._affordable(chunk, cost, most, limit, floor), shortest)
        return self._affordable(chunk, cost, most, limit, floor)

    def commit(self, decode_rows: int, prefill_rows: int) -> None:
        """The next step is so composed: book what it will probably cost."""
        self._mixed = self._mixed + 1 if decode_rows and prefill_rows else 0
        booked = 0.0
        if decode_rows:
            alone = self.times.alone.at(decode_rows)
            if alone is not None:
                extra = self.times.extra.at(prefill_rows) if prefill_rows else 0.0
                booked = alone * (1 / self.share - 1) - (alone * prefill_rows if extra is None else extra)
        self.balance += booked
        self._planned.append((decode_rows, prefill_rows, booked))
        if len(self._planned) > 4:
            self._planned.popleft()

    def observe(self, decode_rows: int, prefill_rows: int, seconds: float) -> None:
        """What the oldest step took that was committed, in seconds from the end of the one before it."""
        self.times.observe(decode_rows, prefill_rows, seconds)
        booked = self._booked(decode_rows, prefill_rows)
        if not decode_rows or booked is None:
            return
        alone = self.times.alone.at(decode_rows)
        if alone is not None:
            # A step without prompts is its own measure: its noise is no fault of the prompts.
            took = seconds if prefill_rows else alone
            self.balance += alone / self.share - min(took, alone + 4 * max(self.max_step_s, alone)) - booked
        if not prefill_rows:
            self.balance = min(self.balance, max(self.max_step_s, self._target))

    def reset(self) -> None:
        """Steps that were committed will not be observed."""
        self._planned.clear()
        self.balance = 0.0

    def _booked(self, decode_rows: int, prefill_rows: int) -> float | None:
        while self._planned:
            decode, prefill, booked = self._planned.popleft()
            if decode == decode_rows and prefill == prefill_rows:
                return booked
        return 0.0

    def _alone(self, rows: int) -> float | None:
        """Seconds of a step without prompts; None if one has to be measured first."""
        alone = self.times.alone
        if self._mixed >= _MIXED_STEPS or not (alone.knows(rows) or alone.smallest < rows < alone.largest):
            return None
        return alone.at(rows)

    def _first(self, alone: float, limit: float, most: int) -> int:
        """Nothing is known yet: a row costs at most what the whole step costs."""
        if self.balance < 0:
            return 0
        return max(1, min(_FIRST_ROWS, most, int(limit / alone)))

    def _cost(self, rows: int, floor: float) -> float:
        seconds = self.times.extra.at(rows)
        assert seconds is not None
        return max(seconds, floor)

    def _chunk(self, most: int, limit: float, floor: float) -> tuple[int, float]:
        """The size to save up for, and its cost."""
        known = min(2 * self.times.extra.largest, most)
        sizes = [s for s in _SIZES if s < known] + [known]
        costs = [self._cost(s, floor) for s in sizes]
        within = [(s, c) for s, c in zip(sizes, costs, strict=True) if c <= limit] or [(sizes[0], costs[0])]
        if within[-1][0] < known or known == most:
            self._explored = True
        best = max(s / c for s, c in within)
        if not self._explored and not self.times.extra.knows(known):
            # Larger chunks are tried until they clearly cost more for what they read.
            largest = self.times.extra.largest
            self._explored = largest / self._cost(largest, floor) < best / 2
            if not self._explored:
                return within[-1]
        return next((s, c) for s, c in within if s / c >= _NEARLY_BEST * best)

    def _affordable(self, chunk: int, cost: float, most: int, limit: float, floor: float) -> int:
        """Nothing until the chunk can be paid, then all that can be paid."""
        if self.balance < cost:
            return 0
        budget = min(self.balance, limit)
        known = min(2 * self.times.extra.largest, most)
        larger = [s for s in (*_SIZES, known) if chunk < s <= known and self._cost(s, floor) <= budget]
        return max(larger, default=chunk)


_SIZES = sorted({1, 2, 4, 8, 12, 16, 24, 32, 48, *range(PAGE, 8 * PAGE, PAGE), *(PAGE * 2**i for i in range(3, 9))})
