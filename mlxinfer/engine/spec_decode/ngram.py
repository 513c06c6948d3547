"""Drafts without a draft model: proposes the tokens that followed the last ones earlier in the sequence.

Prompt lookup decoding (Saxena, 2023), with an index instead of a search, as in llama.cpp's lookup. Uses no MLX.
"""

from __future__ import annotations

from array import array

from .acceptance import LEAST, MEMORY, PRIOR_WEIGHT

_PRIOR = (0.3, 0.3, 0.35, 0.5, 0.7, 0.85, 0.92)
"""Prior probability that a match of length 0, 1, 2-3, 4-7, 8-15... predicts the next token."""
_LENGTHS = (4, 3, 2)
"""Lengths of the n-grams, longest first."""
_LONGEST = 32
"""Largest measured length of a match."""


class NgramIndex:
    """Last positions of the n-grams of one sequence, and the current match. The match predicts `tokens[pointer]`; `run` tokens before that
    equal the last ones.

    A table has one place per hash and overwrites on collision. It takes four bytes a token, and every lookup is checked.
    """

    def __init__(self, tokens: list[int], limit: int) -> None:
        """`tokens`: the sequence's own list, which grows up to `limit`."""
        self.tokens = tokens
        self.pointer = 0
        self.run = 0
        self.known = 0
        """Indexed tokens."""
        size = 1 << max(limit, 64).bit_length()
        self._mask = size - 1
        self._tables = [array("i", bytes(4 * size)) for _ in _LENGTHS]

    def extend(self, count: int) -> None:
        """Index the next `count` tokens, and find a match for the last ones."""
        end = min(self.known + count, len(self.tokens))
        for i in range(self.known, end - 1):
            self._store(i)
        if end > self.known:
            self.run = 0
            self._find(end - 1)
        self.known = end

    def add(self) -> bool | None:
        """Index the next token. Returns True if the match predicted it, None without a match."""
        i = self.known
        self.known = i + 1
        if not self.run:
            self._find(i)
            return None
        if self.tokens[self.pointer] == self.tokens[i]:
            self.pointer += 1
            self.run += 1
            self._store(i)
            return True
        self._find(i)
        return False

    def continuation(self, count: int) -> list[int]:
        """The next `count` predicted tokens; a match that reaches the end wraps around. Empty without a match."""
        if not self.run:
            return []
        tokens, first = self.tokens, self.pointer
        if first + count <= len(tokens):
            return tokens[first : first + count]
        period = len(tokens) - first
        return [tokens[first + i % period] for i in range(count)]

    def _find(self, i: int) -> None:
        """Match the latest earlier position of the longest n-gram that ends at `tokens[i]`, then store the n-grams that end there."""
        self.run = 0
        if i < _LENGTHS[0] - 1:
            return
        tokens, end = self.tokens, i + 1
        for place, table, n in zip(self._places(i), self._tables, _LENGTHS, strict=True):
            found = table[place]
            table[place] = end
            if not self.run and found >= n and tokens[found - n : found] == tokens[end - n : end]:
                self.pointer, self.run = found, self._length(found, end, n)

    def _store(self, i: int) -> None:
        if i >= _LENGTHS[0] - 1:
            for place, table in zip(self._places(i), self._tables, strict=True):
                table[place] = i + 1

    def _places(self, i: int) -> tuple[int, int, int]:
        """Places in the tables of the n-grams that end at `tokens[i]`."""
        d, c, b, a = self.tokens[i - 3 : i + 1]
        two = a * 0x9E3779B1 + b * 0x85EBCA77
        three = two + c * 0xC2B2AE3D
        four = three + d * 0x27D4EB2F
        mask = self._mask
        return (four ^ four >> 15) & mask, (three ^ three >> 15) & mask, (two ^ two >> 15) & mask

    def _length(self, place: int, end: int, known: int) -> int:
        tokens = self.tokens
        while known < min(_LONGEST, place) and tokens[place - 1 - known] == tokens[end - 1 - known]:
            known += 1
        return known


class MatchStats:
    """Rate of right predictions by the length of the match. It learns from every token, drafted or not."""

    def __init__(self) -> None:
        self._right = [p * PRIOR_WEIGHT for p in _PRIOR]
        self._seen = [PRIOR_WEIGHT] * len(_PRIOR)

    def learn(self, run: int, right: bool) -> None:
        """Count a prediction by a match of length `run`."""
        i = min(run.bit_length(), len(_PRIOR) - 1)
        self._right[i] = self._right[i] * MEMORY + right
        self._seen[i] = self._seen[i] * MEMORY + 1

    def chance(self, run: int) -> float:
        """Probability that a match of length `run` predicts the next token."""
        i = min(run.bit_length(), len(_PRIOR) - 1)
        return self._right[i] / self._seen[i]

    def chances(self, run: int, count: int) -> list[float]:
        """Probabilities that the first predicted token is right, the first two, and so on up to `count`, as long as drafting pays."""
        found: list[float] = []
        whole = 1.0
        for i in range(count):
            whole *= self.chance(run + i)
            if whole < LEAST:
                break
            found.append(whole)
        return found
