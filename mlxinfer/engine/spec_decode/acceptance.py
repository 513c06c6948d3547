"""How many tokens to draft: from how often drafts were right, and from how long steps took. Nothing here knows MLX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_PRIOR = (0.3, 0.3, 0.35, 0.5, 0.7, 0.85, 0.92)
"""How often a match of length 0, 1, 2-3, 4-7, 8-15... foretells the next token, until it is known better."""
_PRIOR_WEIGHT = 6.0
_MEMORY = 0.98
"""What the past weighs at each new token."""

LEAST = 0.08
"""A draft that is less likely than this costs more than it brings, on every machine."""


class MatchStats:
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
        """That the first of the next tokens is right, the first two, and so on, as far as it is worth to draft them."""
        found: list[float] = []
        whole = 1.0
        for i in range(count):
            whole *= self.chance(run + i)
            if whole < LEAST:
                break
            found.append(whole)
        return found


class Acceptance:
    """How often the draft at each place was right, if those before it were: for a drafter that cannot be tried without cost. A place that
    has been seen rarely is taken to be like the one before it."""

    def __init__(self, prior: float = 0.7) -> None:
        self._prior = prior
        self._right: list[float] = []
        self._seen: list[float] = []

    def copy(self) -> Acceptance:
        """Begins with what this one knows."""
        return Acceptance(self._conditional(0, self._prior))

    def learn(self, drafted: int, accepted: int) -> None:
        missing = max(drafted - len(self._seen), 0)
        self._right += [0.0] * missing
        self._seen += [0.0] * missing
        for i in range(min(accepted + 1, drafted)):
            self._right[i] = self._right[i] * _MEMORY + (i < accepted)
            self._seen[i] = self._seen[i] * _MEMORY + 1

    def chances(self, count: int) -> list[float]:
        """That the first draft holds, the first two, and so on, as far as it is worth to draft them."""
        found: list[float] = []
        whole, before = 1.0, self._prior
        for i in range(count):
            before = self._conditional(i, before)
            whole *= before
            if whole < LEAST:
                break
            found.append(whole)
        return found

    def _conditional(self, i: int, before: float) -> float:
        if i >= len(self._seen):
            return before
        return (self._right[i] + _PRIOR_WEIGHT * before) / (self._seen[i] + _PRIOR_WEIGHT)


@dataclass(slots=True)
class RoundTimes:
    """Seconds of steps by their rows, exponentially averaged: of those submitted ahead of time, and of those that wait for the one before
    (`drained`). Kept as multiples of `unit`, which follows the speed of the machine. A size not seen yet is taken to cost little more than
    the next smaller one, so that it is tried."""

    plain: dict[int, float] = field(default_factory=dict)
    drained: dict[int, float] = field(default_factory=dict)
    unit: float = 0.0
    _counts: dict[tuple[bool, int], int] = field(default_factory=dict)

    def observe(self, rows: int, seconds: float, *, drained: bool) -> None:
        table = self.drained if drained else self.plain
        count = self._counts[drained, rows] = self._counts.get((drained, rows), 0) + 1
        if count == 1:
            self.unit = self.unit or seconds
            table[rows] = seconds / self.unit
            return
        if count > _KNOWN:
            # A single slow step, while the machine was busy with something else, should not count for long.
            change = min(max(seconds / (table[rows] * self.unit), 0.5), 2.0)
            self.unit *= change**0.2
            seconds = change * table[rows] * self.unit
        table[rows] += (0.02 if count > _KNOWN else 1 / count) * (seconds / self.unit - table[rows])

    def step(self, rows: int) -> float:
        """Of a step submitted ahead of time; 0 if none has been seen."""
        return self.unit * _estimate(self.plain, rows)

    def round(self, rows: int) -> float:
        """Of a step that waits for the one before."""
        return self.unit * _estimate({r: t * _WAIT for r, t in self.plain.items()} | self.drained, rows)


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


_KNOWN = 4
"""Steps of a size after which its share is known well enough to tell the speed of the machine."""

_WAIT = 1.1
"""A step that waits, by one of the same size that does not, as long as it is not known."""

_SLOPE = 0.1
"""What a row more adds to a step, as long as it is not known."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """`chances[i]` is that the first i + 1 drafts of a sequence hold; `turn` is the seconds that a draft model needs for each of them, for
    all sequences together."""

    chances: Sequence[float]
    turn: float = 0.0


def best_lengths(prospects: Sequence[Candidate], rows: int, times: RoundTimes) -> tuple[list[int], float]:
    """How many drafts of each sequence make the next step yield most tokens a second, and how much more that is than without (1 is as
    much). `rows` is what the step has without drafts, a token for each."""
    lengths = [0] * len(prospects)
    if not times.step(rows):
        return lengths, 1.0
    plain = rows / times.step(rows)
    best, most = list(lengths), 1.0
    tokens, size, turns = float(rows), rows, 0.0
    while True:
        ahead = [(p.chances[n], s) for s, (p, n) in enumerate(zip(prospects, lengths, strict=True)) if n < len(p.chances)]
        if not ahead:
            return best, most
        chance, s = max(ahead)
        lengths[s] += 1
        tokens += chance
        size += 1
        turns = max(turns, lengths[s] * prospects[s].turn)
        gain = tokens / (times.round(size) + turns) / plain
        if gain > most:
            best, most = list(lengths), gain


@dataclass(slots=True)
class GainAccount:
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
