"""How much of the prompts is read next to running answers, so that these keep their share of the speed they have alone."""

from __future__ import annotations

from collections import defaultdict, deque

from ...cache.pages import PAGE
from .step_times import StepTimes

_NEARLY_BEST = 0.9
"""The smallest chunk is taken that reads this part of what the best one reads in the same time: streams stay smooth."""
_FIRST_ROWS = 16
"""Rows of prompts in the first step that has any."""
_MIXED_STEPS = 32
"""After this many steps with prompts there is one without, so that it stays known how long one takes."""
_RARE = 0.02
"""The cost of a chunk is never known more exactly than to this part of a step."""
_QUIET_S = 1.0
"""Seconds that a step may take where no answer runs: an interrupt waits for that long, and a GPU's watchdog for a few seconds more."""
_QUIET_ROWS, _LEAST_ROWS = 512, 256
"""Rows of such a step before one was measured, and the least: shorter ones read prompts more slowly."""


class PrefillBudget:
    """An account of seconds. A step in which answers get a token each pays in what that may cost, `t / share` where `t` is its time
    without prompts, and takes out what it did cost. Prompts are read from what is there, in chunks of the size that reads most for
    its cost, which may have to be saved up for. A balance below zero, after a misjudged step or a short prompt, is paid back first.
    """

    def __init__(self, times: StepTimes, *, share: float, max_step_s: float) -> None:
        """`share`: the part of their speed that answers keep; `max_step_s`: seconds that a step with prompts may take. Raises `ValueError`
        for a share that is none."""
        if not 0 < share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, not {share}")
        self.times = times
        self.share = share
        self.max_step_s = max_step_s
        self.balance = 0.0
        """Seconds that may be spent on prompts."""
        self.plain: defaultdict[int, int] = defaultdict(int)
        """Steps without prompts that have not been booked yet, by their rows: whoever schedules one counts it here."""
        self._planned: deque[tuple[int, int, float]] = deque()
        self._target = 0.0
        self._explored = False
        self._mixed = 0

    def allowance(self, decode_rows: int, wanted: int, most: int, shortest: int = 0) -> int:
        """Rows of prompts for a step with `decode_rows` rows of answers, of the `wanted` that are left to read and at most `most`. The
        next prompt in line has `shortest` rows left: it may overdraw the account a little if that brings it to its end."""
        most = min(wanted, most)
        if not decode_rows or most <= 0:
            return max(min(most, self._quiet_rows()), 0)
        self._credit()
        alone = self._alone(decode_rows)
        if alone is None:
            return 0
        limit = max(self.max_step_s - alone, alone)
        floor = alone * _RARE
        if not self.times.prompts.largest:
            return self._first(alone, limit, most)
        chunk, cost = self._chunk(most, limit, floor)
        self._target = max(cost, 2 * alone * (1 / self.share - 1))
        self.balance = min(self.balance, self._target)
        if 0 < shortest <= most and self.balance >= 0:
            spare = self.balance + self.max_step_s / 4
            if self._cost(shortest, floor) <= min(spare, limit):
                return max(self._affordable(chunk, cost, most, limit, floor), shortest)
        return self._affordable(chunk, cost, most, limit, floor)

    def must_measure(self, decode_rows: int, prefill_rows: int, most: int) -> bool:
        """Whether a step has to be timed before the next one, of up to `most` rows, is scheduled: the first that only reads a prompt."""
        return most > _QUIET_ROWS <= prefill_rows and not decode_rows and not self.times.reading

    def _quiet_rows(self) -> int:
        """Rows of a step that no answer waits for."""
        reading = self.times.reading
        return max(int(_QUIET_S / reading), _LEAST_ROWS) if reading else _QUIET_ROWS

    def commit(self, decode_rows: int, prefill_rows: int) -> None:
        """Book what the next step, which reads prompts, will probably cost."""
        self._credit()
        self._mixed = self._mixed + 1 if decode_rows else 0
        alone = self.times.alone(decode_rows) if decode_rows else None
        booked = 0.0
        if alone is not None:
            extra = self.times.prompts.at(prefill_rows)
            booked = alone * (1 / self.share - 1) - (alone * prefill_rows if extra is None else extra)
        self.balance += booked
        self._planned.append((decode_rows, prefill_rows, booked))
        if len(self._planned) > 4:
            self._planned.popleft()

    def _credit(self) -> None:
        """Book the steps without prompts since the last one with prompts: what they pay in, up to what may be saved."""
        if not self.plain:
            return
        for rows, steps in self.plain.items():
            self.balance += steps * (self.times.alone(rows) or 0.0) * (1 / self.share - 1)
        self.balance = min(self.balance, max(self.max_step_s, self._target))
        self.plain.clear()
        self._mixed = 0

    def observe(self, decode_rows: int, prefill_rows: int, seconds: float) -> None:
        """What a step with prompts took that was committed, in seconds from the end of the one before it; `times` has learnt from it
        already. A step without prompts is its own measure: its noise is no fault of the prompts, so that it need not be told."""
        if not decode_rows or not prefill_rows:
            return
        booked = self._booked(decode_rows, prefill_rows)
        alone = self.times.alone(decode_rows)
        if alone is not None:
            self.balance += alone / self.share - min(seconds, alone + 4 * max(self.max_step_s, alone)) - booked

    def _booked(self, decode_rows: int, prefill_rows: int) -> float:
        while self._planned:
            decode, prefill, booked = self._planned.popleft()
            if decode == decode_rows and prefill == prefill_rows:
                return booked
        return 0.0

    def _alone(self, rows: int) -> float | None:
        """Seconds of a step without prompts; None if one has to be measured first."""
        return self.times.alone(rows) if self._mixed < _MIXED_STEPS and self.times.knows(rows) else None

    def _first(self, alone: float, limit: float, most: int) -> int:
        """Nothing is known yet: a row costs at most what the whole step costs."""
        if self.balance < 0:
            return 0
        return max(1, min(_FIRST_ROWS, most, int(limit / alone)))

    def _cost(self, rows: int, floor: float) -> float:
        seconds = self.times.prompts.at(rows)
        assert seconds is not None
        return max(seconds, floor)

    def _chunk(self, most: int, limit: float, floor: float) -> tuple[int, float]:
        """The size to save up for, and its cost."""
        known = min(2 * self.times.prompts.largest, most)
        sizes = [s for s in _SIZES if s < known] + [known]
        costs = [self._cost(s, floor) for s in sizes]
        within = [(s, c) for s, c in zip(sizes, costs, strict=True) if c <= limit] or [(sizes[0], costs[0])]
        if within[-1][0] < known or known == most:
            self._explored = True
        best = max(s / c for s, c in within)
        if not self._explored and not self.times.prompts.knows(known):
            # Larger chunks are tried until they clearly cost more for what they read.
            largest = self.times.prompts.largest
            self._explored = largest / self._cost(largest, floor) < best / 2
            if not self._explored:
                return within[-1]
        return next((s, c) for s, c in within if s / c >= _NEARLY_BEST * best)

    def _affordable(self, chunk: int, cost: float, most: int, limit: float, floor: float) -> int:
        """Nothing until the chunk can be paid, then all that can be paid."""
        if self.balance < cost:
            return 0
        budget = min(self.balance, limit)
        known = min(2 * self.times.prompts.largest, most)
        larger = [s for s in (*_SIZES, known) if chunk < s <= known and self._cost(s, floor) <= budget]
        return max(larger, default=chunk)


_SIZES = sorted({1, 2, 4, 8, 12, 16, 24, 32, 48, *range(PAGE, 8 * PAGE, PAGE), *(PAGE * 2**i for i in range(3, 9))})
