"""How many tokens to draft: from how often drafts were right, and from how long steps took. Nothing here knows MLX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_PRIOR = (0.3, 0.3, 0.35, 0.5, 0.7, 0.85, 0.92)
"""How often a match of length 0, 1, 2-3, 4-7, 8-15... foretells the next token, until it is known better."""
_PRIOR_WEIGHT = 6.0
_MEMORY = 0.98
"""What the past weighs at each new token."""


class Foresight:
    """How often the next token was foretold, by the length of the match. Every token teaches it, drafted or not."""

    def __init__(self) -> None:
        self._right = [p * _PRIOR_WEIGHT for p in _PRIOR]
        self._seen = [_PRIOR_WEIGHT] * len(_PRIOR)

    def learn(self, run: int, right: bool) -> None:
        i = min(run.bit_length(), len(_PRIOR) - 1)
        self._right[i] = self._right[i] * _MEMORY + right
        self._seen[i] = self._seen[i] * _MEMORY + 1

    def chance(self, run: int) -> float:
        """That the next token is what follows a match of this length."""
        i = min(run.bit_length(), len(_PRIOR) - 1)
        return self._right[i] / self._seen[i]

    def chances(self, run: int, count: int) -> list[float]:
        """That the first of the next tokens is right, the first two, and so on."""
        found: list[float] = []
        whole = 1.0
        for i in range(count):
            whole *= self.chance(run + i)
            found.append(whole)
        return found


class Acceptance:
    """How often the draft at each place was right, if those before it were: for a drafter that cannot be tried without cost."""

    def __init__(self, prior: float = 0.7) -> None:
        self._prior = prior
        self._right: list[float] = []
        self._seen: list[float] = []

    def learn(self, drafted: int, accepted: int) -> None:
        while len(self._seen) < drafted:
            self._seen.append(_PRIOR_WEIGHT)
            self._right.append(self._prior * _PRIOR_WEIGHT)
        for i in range(min(accepted + 1, drafted)):
            self._right[i] = self._right[i] * _MEMORY + (i < accepted)
            self._seen[i] = self._seen[i] * _MEMORY + 1

    def chances(self, count: int) -> list[float]:
        """That the first draft holds, the first two, and so on."""
        found: list[float] = []
        whole = 1.0
        for i in range(count):
            known = self._right[i] / self._seen[i] if i < len(self._seen) else (found[-1] / found[-2] if i > 1 else self._prior)
            whole *= known
            found.append(whole)
        return found


@dataclass(slots=True)
class RoundTimes:
    """Seconds of steps by their rows, exponentially averaged: of those submitted ahead of time, and of those that wait for the one before
    (`drained`). Kept as multiples of `unit`, which follows the speed of the machine. A size not seen yet is taken to cost little more than
    the next smaller one, so that it is tried."""

    plain: dict[int, float] = field(default_factory=dict)
    drained: dict[int, float] = field(default_factory=dict)
    unit: float = 0.0

    def observe(self, rows: int, seconds: float, *, drained: bool) -> None:
        table = self.drained if drained else self.plain
        expected = _estimate(table, rows) or 1 + _SLOPE * rows
        if not self.unit:
            self.unit = seconds / expected
        # A single slow step, while the machine was busy with something else, should not count for long.
        seconds = min(seconds, 2 * expected * self.unit)
        if rows in table:
            self.unit *= (seconds / (expected * self.unit)) ** 0.1
        table[rows] = expected + (0.2 if rows in table else 0.5) * (seconds / self.unit - expected)

    def step(self, rows: int) -> float:
        """Of a step submitted ahead of time; 0 if none has been seen."""
        return self.unit * _estimate(self.plain, rows)

    def round(self, rows: int) -> float:
        """Of a step that waits for the one before."""
        return self.unit * (_estimate(self.drained, rows) or 1.1 * _estimate(self.plain, rows))


def _estimate(table: dict[int, float], rows: int) -> float:
    """Between the sizes that are known; never more than of a larger one."""
    above = {r: t for r, t in table.items() if r >= rows}
    below = [r for r in table if r < rows]
    if rows in table:
        return min(above.values())
    if below and above:
        low, high = max(below), min(above)
        return min(table[low] + (table[high] - table[low]) * (rows - low) / (high - low), *above.values())
    if below:
        return table[max(below)] * (1 + _SLOPE * (rows - max(below)))
    return min(above.values(), default=0.0)


_SLOPE = 0.1
"""What a row more adds to a step, as long as it is not known."""


def best_lengths(chances: Sequence[Sequence[float]], rows: int, times: RoundTimes, *, extra: float = 0.0) -> tuple[list[int], float]:
    """How many drafts of each sequence make the next step yield most tokens a second, and how much more that is than without (1 is as
    much). `chances[s][i]` is that the first i + 1 drafts of s hold; `rows` is what the step has without drafts, a token for each; `extra`
    seconds are added to a step with drafts."""
    lengths = [0] * len(chances)
    plain = rows / (times.step(rows) or 1.0)
    best, most = list(lengths), 1.0
    tokens, size = float(rows), rows
    while True:
        ahead = [(c[n], s) for s, (c, n) in enumerate(zip(chances, lengths, strict=True)) if n < len(c)]
        if not ahead:
            return best, most
        chance, s = max(ahead)
        lengths[s] += 1
        tokens += chance
        size += 1
        gain = tokens / ((times.round(size) or 1.0) + extra) / plain
        if gain > most:
            best, most = list(lengths), gain


@dataclass(slots=True)
class Account:
    """Seconds that speculation has saved and lost. What it may lose is a small part of all time, and a step or so at the start: where
    it does not pay it is tried ever more rarely."""

    share: float = 0.02
    elapsed: float = 0.0
    saved: float = 0.0
    _longest: float = 0.0

    @property
    def open(self) -> bool:
        return self.saved >= -self.share * self.elapsed - 0.5 * self._longest

    def plain(self, seconds: float) -> None:
        self.elapsed += seconds
        self._longest += 0.05 * (seconds - self._longest)

    def round(self, seconds: float, plain_seconds: float) -> None:
        """A step took `seconds`, and what it gave would have taken `plain_seconds`."""
        self.elapsed += plain_seconds
        # What was won long ago does not pay for losses without end.
        self.saved = min(self.saved + plain_seconds - seconds, 0.1 * self.elapsed, 8 * plain_seconds)
