"""Stop strings over a stream of text: a pure state machine."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts a stream of text before the first stop string, wherever the chunk borders fall.

    Text that may be the beginning of a stop string is held back until more text decides. The stop string itself is never
    emitted. Where two end at the same character, the one that begins earlier wins.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(string for string in strings if string)
        self._held = ""
        self.met: str | None = None
        """The stop string that ended the text."""

    def add(self, text: str) -> tuple[str, bool]:
        """Take the next chunk; returns the text that is safe to emit, and whether a stop string was met."""
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
        """The text still held back when the stream ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self) -> tuple[int, int] | None:
        """Where it ends and where it begins."""
        found = [(at + len(string), at) for string in self._strings if (at := self._held.find(string)) >= 0]
        return min(found, default=None)

    def _possible_beginning(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = 0
        for string in self._strings:
            for size in range(min(len(string) - 1, len(self._held)), longest, -1):
                if self._held.endswith(string[:size]):
                    longest = size
                    break
        return longest
