"""How many tokens to draft: from how often drafts were right, and from how long steps take. Nothing here knows MLX."""

from __future__ import annotations

from collections.abc import Sequence

from ...util.dataclass import dataclass
from ..core.step_times import StepTimes

PRIOR_WEIGHT = 6.0
"""Tokens that a first guess weighs as much as."""
MEMORY = 0.98
"""Weight of the past at each new token."""
LEAST = 0.08
"""A draft that is less likely than this costs more than it brings, on every machine."""


class Acceptance:
    """How often the draft at each place was right, if those before it were: for a draft model, which cannot be tried without cost. A place
    that was seen rarely is taken to be like the one before it."""

    def __init__(self, prior: float = 0.7) -> None:
        self._prior = prior
        self._right: list[float] = []
        self._seen: list[float] = []

    def copy(self) -> Acceptance:
        """Another one, which begins with what this one knows."""
        return Acceptance(self._conditional(0, self._prior))

    def learn(self, drafted: int, accepted: int) -> None:
        """The first `accepted` of `drafted` tokens in a row held."""
        missing = max(drafted - len(self._seen), 0)
        self._right += [0.0] * missing
        self._seen += [0.0] * missing
        for i in range(min(accepted + 1, drafted)):
            self._right[i] = self._right[i] * MEMORY + (i < accepted)
            self._seen[i] = self._seen[i] * MEMORY + 1

    def chances(self, count: int) -> list[float]:
        """Probabilities that the first draft holds, the first two, and so on up to `count`, as far as drafting them is worth it."""
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
        return (self._right[i] + PRIOR_WEIGHT * before) / (self._seen[i] + PRIOR_WEIGHT)


@dataclass(frozen=True, slots=True)
class Candidate:
    """What drafting for one sequence promises."""

    chances: Sequence[float]
    """`chances[i]`: probability that the first i + 1 drafts hold; a draft that never does is none."""
    turn: float = 0.0
    """Seconds that the draft model needs for each draft, for all sequences together; 0 for drafts from the text itself."""


def best_lengths(candidates: Sequence[Candidate], rows: int, times: StepTimes) -> tuple[list[int], float]:
    """How many drafts of each sequence make the next step yield most tokens a second, and how many times as many tokens a second that are
    as without drafts. `rows`: rows of the step without drafts, each of which gives a token."""
    lengths = [0] * len(candidates)
    alone = times.step(rows)
    if not alone:
        return lengths, 1.0
    plain = rows / alone
    best, most = list(lengths), 1.0
    tokens, size, turns = float(rows), rows, 0.0
    while True:
        ahead = [(p.chances[n], s) for s, (p, n) in enumerate(zip(candidates, lengths, strict=True)) if n < len(p.chances) and p.chances[n]]
        if not ahead:
            return best, most
        chance, s = max(ahead)
        lengths[s] += 1
        tokens += chance
        size += 1
        turns = max(turns, lengths[s] * candidates[s].turn)
        gain = tokens / (times.round(size) + turns) / plain
        if gain > most:
            best, most = list(lengths), gain
