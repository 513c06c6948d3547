"""Limits the prompt rows of a step, so that running answers keep a share of the speed that they have alone."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

from ...cache.pages import PAGE
from .step_times import StepTimes

_NEARLY_BEST = 0.9
"""Use the smallest chunk with at least this part of the best chunk's rows per second: streams stay smooth."""
_FIRST_ROWS = 16
"""Rows of prompts in the first step that has any."""
_MIXED_STEPS = 32
"""Steps with prompts after which one without is measured."""
_RARE = 0.02
"""Least cost of a chunk, as a part of a step: measurements are no more exact."""
_QUIET_S = 1.0
"""Longest step in seconds if no answer runs. An interrupt waits that long; a GPU's watchdog waits a few seconds more."""
_QUIET_ROWS, _LEAST_ROWS = 512, 256
"""Rows of such a step before one was measured, and its least rows: shorter steps read prompts more slowly."""


class PrefillBudget:
    """An account of seconds. Each decode step credits `t / share`, where `t` is its time without prompts, and debits its duration.

    Prompts are read from the balance, in chunks of the size with the most rows per second. Such a chunk may have to be saved up for.
    A negative balance, after a misjudged step or a short prompt, is paid back first.
    """

    def __init__(self, times: StepTimes, *, share: float, max_step_s: float) -> None:
        """`share`: the part of their speed that answers keep. `max_step_s`: longest step with prompts, in seconds. Raises `ValueError`
        unless 0 < share <= 1."""
        if not 0 < share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, not {share}")
        self.times = times
        self.share = share
        self.max_step_s = max_step_s
        self.most_rows: Callable[[], int | None] = lambda: None
        """Returns the maximum rows of prompts in a step, if a GPU aborted longer ones."""
        self.balance = 0.0
        """Seconds available for prompts."""
        self.plain: defaultdict[int, int] = defaultdict(int)
        """Steps without prompts that are not booked yet, by their rows; the scheduler counts them here."""
        self._planned: deque[tuple[int, int, float]] = deque()
        self._target = 0.0
        self._explored = False
        self._mixed = 0

    def allowance(self, decode_rows: int, wanted: int, most: int, shortest: int = 0) -> int:
        """Rows of prompts for a step with `decode_rows` rows of answers: at most `most`, of `wanted` remaining ones. The next prompt has
        `shortest` rows left, and may overdraw the account a little if it then ends."""
        longest = self.most_rows()
        most = min(wanted, most) if longest is None else min(wanted, most, longest)
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

    def may_spend(self) -> bool:
        """True if the account is not overdrawn, so that other work than prompts may use the device between two decode steps."""
        self._credit()
        return self.balance >= 0

    def spend(self, seconds: float) -> None:
        """Debit the duration of such work. An unexpectedly long one counts as a few steps."""
        self.balance -= min(seconds, 4 * self.max_step_s)

    def must_measure(self, decode_rows: int, prefill_rows: int, most: int) -> bool:
        """True if a step must be timed before the next one, of up to `most` rows, is scheduled: the first step without answers."""
        return most > _QUIET_ROWS <= prefill_rows and not decode_rows and not self.times.reading

    def _quiet_rows(self) -> int:
        """Rows of a step without answers."""
        reading = self.times.reading
        return max(int(_QUIET_S / reading), _LEAST_ROWS) if reading else _QUIET_ROWS

    def commit(self, decode_rows: int, prefill_rows: int) -> None:
        """Book the expected cost of the next step, which reads prompts."""
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
        """Book the credits of the steps without prompts since the last one with prompts, up to the maximum balance."""
        if not self.plain:
            return
        for rows, steps in self.plain.items():
            self.balance += steps * (self.times.alone(rows) or 0.0) * (1 / self.share - 1)
        self.balance = min(self.balance, max(self.max_step_s, self._target))
        self.plain.clear()
        self._mixed = 0

    def observe(self, decode_rows: int, prefill_rows: int, seconds: float) -> None:
        """Replace the expected cost of a committed step by the measured one: `seconds` from the end of the step before. `times` has
        learnt from the step already. Steps without prompts change nothing: their noise does not come from prompts."""
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
        """Seconds of a step without prompts; None if one must be measured first."""
        return self.times.alone(rows) if self._mixed < _MIXED_STEPS and self.times.knows(rows) else None

    def _first(self, alone: float, limit: float, most: int) -> int:
        """Rows of the first chunk. Without measurements, a row costs at most as much as the whole step."""
        if self.balance < 0:
            return 0
        return max(1, min(_FIRST_ROWS, most, int(limit / alone)))

    def _cost(self, rows: int, floor: float) -> float:
        seconds = self.times.prompts.at(rows)
        assert seconds is not None
        return max(seconds, floor)

    def _chunk(self, most: int, limit: float, floor: float) -> tuple[int, float]:
        """(rows of the chunk to save up for, its cost)."""
        known = min(2 * self.times.prompts.largest, most)
        sizes = [s for s in _SIZES if s < known] + [known]
        costs = [self._cost(s, floor) for s in sizes]
        within = [(s, c) for s, c in zip(sizes, costs, strict=True) if c <= limit] or [(sizes[0], costs[0])]
        if within[-1][0] < known or known == most:
            self._explored = True
        best = max(s / c for s, c in within)
        if not self._explored and not self.times.prompts.knows(known):
            # Larger chunks are tried until they are clearly slower per row.
            largest = self.times.prompts.largest
            self._explored = largest / self._cost(largest, floor) < best / 2
            if not self._explored:
                return within[-1]
        return next((s, c) for s, c in within if s / c >= _NEARLY_BEST * best)

    def _affordable(self, chunk: int, cost: float, most: int, limit: float, floor: float) -> int:
        """0 until the chunk is affordable, then the most rows that are."""
        if self.balance < cost:
            return 0
        budget = min(self.balance, limit)
        known = min(2 * self.times.prompts.largest, most)
        larger = [s for s in (*_SIZES, known) if chunk < s <= known and self._cost(s, floor) <= budget]
        return max(larger, default=chunk)


_SIZES = sorted({1, 2, 4, 8, 12, 16, 24, 32, 48, *range(PAGE, 8 * PAGE, PAGE), *(PAGE * 2**i for i in range(3, 9))})
