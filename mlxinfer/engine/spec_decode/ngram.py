"""Drafts without a draft model: a sequence goes on as it went on before.

Prompt lookup decoding (Saxena, 2023), with an index instead of a search, as in llama.cpp's lookup: where the last tokens stood before,
what followed there is proposed. Nothing here knows MLX.
"""

from __future__ import annotations

from array import array

from .acceptance import LEAST, MEMORY, PRIOR_WEIGHT

_PRIOR = (0.3, 0.3, 0.35, 0.5, 0.7, 0.85, 0.92)
"""How often a match of length 0, 1, 2-3, 4-7, 8-15... foretells the next token, until it is known better."""
_LENGTHS = (4, 3, 2)
"""Lengths of the n-grams that are looked up, longest first."""
_LONGEST = 32
"""Longer matches are not measured."""


class NgramIndex:
    """Where the n-grams of one sequence last stood, and the match that is being followed: it goes on at `tokens[pointer]`, and `run` tokens
    before that agree with the last ones.

    A table has a place for each hash and forgets on collision, so that it takes four bytes a token and a lookup is checked.
    """

    def __init__(self, tokens: list[int], limit: int) -> None:
        """`tokens` is the sequence's own list, which grows up to `limit`."""
        self.tokens = tokens
        self.pointer = 0
        self.run = 0
        self.known = 0
        """Tokens that are indexed; the others come with `extend` or `add`."""
        size = 1 << max(limit, 64).bit_length()
        self._mask = size - 1
        self._tables = [array("i", bytes(4 * size)) for _ in _LENGTHS]

    def extend(self, count: int) -> None:
        """Index the next `count` tokens, and look for what follows the last one."""
        end = min(self.known + count, len(self.tokens))
        for i in range(self.known, end - 1):
            self._store(i)
        if end > self.known:
            self.run = 0
            self._find(end - 1)
        self.known = end

    def add(self) -> bool | None:
        """Index the next token. Whether the match had foretold it, None if there was none."""
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
        """The next `count` tokens as foretold; a match that reaches the end goes round. Empty without a match."""
        if not self.run:
            return []
        tokens, first = self.tokens, self.pointer
        if first + count <= len(tokens):
            return tokens[first : first + count]
        period = len(tokens) - first
        return [tokens[first + i % period] for i in range(count)]

    def _find(self, i: int) -> None:
        """Follow the latest place where the longest n-gram that ends at `tokens[i]` stood before; then store those that end there."""
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
        """Places in the tables for the n-grams that end at `tokens[i]`."""
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
    """How often the next token was foretold, by the length of the match. It learns from every token, drafted or not."""

    def __init__(self) -> None:
        self._right = [p * PRIOR_WEIGHT for p in _PRIOR]
        self._seen = [PRIOR_WEIGHT] * len(_PRIOR)

    def learn(self, run: int, right: bool) -> None:
        """A match of length `run` foretold the next token, or did not."""
        i = min(run.bit_length(), len(_PRIOR) - 1)
        self._right[i] = self._right[i] * MEMORY + right
        self._seen[i] = self._seen[i] * MEMORY + 1

    def chance(self, run: int) -> float:
        """Probability that the next token is what follows a match of length `run`."""
        i = min(run.bit_length(), len(_PRIOR) - 1)
        return self._right[i] / self._seen[i]

    def chances(self, run: int, count: int) -> list[float]:
        """Probabilities that the first of the next tokens is right, the first two, and so on up to `count`, as far as that is worth it."""
        found: list[float] = []
        whole = 1.0
        for i in range(count):
            whole *= self.chance(run + i)
            if whole < LEAST:
                break
            found.append(whole)
        return found
