"""Ends of answers that the model does not mark: stop strings, and loops."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

SHORTEST = 20
"""Minimum tokens of what repeats. Shorter repetitions count as one of several copies: 7 tokens as one of 21."""
LONGEST = 512
"""Maximum tokens of what repeats."""
COPIES = 5
"""Copies of the same tokens, one after another, that are a loop."""


class StopStrings:
    """Truncates a stream of text before the first stop string, independent of chunk borders.

    Text that may start a stop string is held back until more text decides. The stop string is not emitted. If two end at the same
    character, the one that starts earlier wins.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(string for string in strings if string)
        self._held = ""
        self.met: str | None = None
        """Stop string that ended the text; None before that."""

    def add(self, text: str) -> tuple[str, bool]:
        """Add a chunk and return (text that may be emitted, True if a stop string was found)."""
        if self.met is not None:
            return "", True
        self._held += text
        cut = self._first_stop()
        if cut is not None:
            end, begin = cut
            safe, self.met, self._held = self._held[:begin], self._held[begin:end], ""
            return safe, True
        keep = self._possible_beginning()
        safe, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return safe, False

    def finish(self) -> str:
        """End the stream and return the text that was held back."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self) -> tuple[int, int] | None:
        """Return (end, start) of the first stop string; None if not found."""
        found = [(at + len(string), at) for string in self._strings if (at := self._held.find(string)) >= 0]
        return min(found, default=None)

    def _possible_beginning(self) -> int:
        """Return the length of the longest suffix of the held text that starts a stop string."""
        longest = 0
        for string in self._strings:
            for size in range(min(len(string) - 1, len(self._held)), longest, -1):
                if self._held.endswith(string[:size]):
                    longest = size
                    break
        return longest


class LoopDetector:
    """Finds the end of `COPIES` copies of the same `SHORTEST` to `LONGEST` tokens, in constant time for most tokens.

    A distance is a candidate once the last `SHORTEST` tokens occurred that far back. It stays one while each token equals the one at that
    distance.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._window: deque[int] = deque(maxlen=SHORTEST)
        self._last: dict[int, int] = {}
        """The position after the last occurrence of each window of `SHORTEST` tokens, by the window's hash."""
        self._distance = 0
        self._equal = 0
        """The number of last tokens that equal those `_distance` before them."""

    def add(self, token: int) -> bool:
        """Return True if the answer ends in a loop with this token."""
        self._tokens.append(token)
        self._window.append(token)
        count = len(self._tokens)
        if count <= SHORTEST:
            return False
        if self._distance and self._tokens[count - 1 - self._distance] == token:
            self._equal += 1
        else:
            self._distance = self._equal = 0
        window = hash(tuple(self._window))
        before = self._last.get(window, 0)
        self._last[window] = count
        if not self._distance and count - before <= LONGEST and self._tokens[before - SHORTEST : before] == [*self._window]:
            self._distance, self._equal = count - before, self._equal_at(count - before)
        return bool(self._distance) and self._distance + self._equal >= COPIES * _multiple(self._distance)

    def _equal_at(self, distance: int) -> int:
        """Return the number of last tokens that equal those at a distance."""
        tokens, end = self._tokens, len(self._tokens)
        most = min(end - distance, COPIES * LONGEST)
        return next((n for n in range(SHORTEST, most) if tokens[end - 1 - n] != tokens[end - 1 - n - distance]), most)


def _multiple(distance: int) -> int:
    """Return the smallest multiple of a distance that is `SHORTEST` or more."""
    return -(-SHORTEST // distance) * distance
