"""Chooses draft lengths from acceptance rates and step times. Uses no MLX."""

from __future__ import annotations

from collections.abc import Sequence

from ...util.dataclass import dataclass
from ..core.step_times import StepTimes

PRIOR_WEIGHT = 6.0
"""Weight of a first guess, in tokens."""
MEMORY = 0.98
"""Factor on earlier counts at each new token."""
LEAST = 0.08
"""Least useful probability of a draft: below it a draft costs more than it gains, on every machine."""


class Acceptance:
    """Acceptance rate of the draft at each place, given that those before were accepted. For draft models, whose drafts cost time. A rarely
    seen place is assumed to be like the one before."""

    def __init__(self, prior: float = 0.7) -> None:
        self._prior = prior
        self._right: list[float] = []
        self._seen: list[float] = []

    def copy(self) -> Acceptance:
        """A new object with this one's first rate as its prior."""
        return Acceptance(self._conditional(0, self._prior))

    def learn(self, drafted: int, accepted: int) -> None:
        """Count that the first `accepted` of `drafted` tokens were accepted."""
        missing = max(drafted - len(self._seen), 0)
        self._right += [0.0] * missing
        self._seen += [0.0] * missing
        for i in range(min(accepted + 1, drafted)):
            self._right[i] = self._right[i] * MEMORY + (i < accepted)
            self._seen[i] = self._seen[i] * MEMORY + 1

    def chances(self, count: int) -> list[float]:
        """Probabilities that the first draft is accepted, the first two, and so on up to `count`, as long as drafting pays."""
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
    """Possible drafts of one sequence."""

    chances: Sequence[float]
    """`chances[i]`: probability that the first i + 1 drafts are accepted."""
    turn: float = 0.0
    """Seconds of the draft model per draft, for all sequences together; 0 for n-grams."""


def best_lengths(candidates: Sequence[Candidate], rows: int, times: StepTimes) -> tuple[list[int], float]:
    """Drafts per sequence that maximise tokens per second of the next step, and the speed-up over no drafts. `rows`: rows of the step
    without drafts, each of which gives a token."""
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
