"""Search for tokens that a text spells and a tokenizer's library does not cut out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator


class TokenSearch:
    """Tokens, as a text would spell them. Safe to share between threads.

    There can be thousands. A regular expression of that many alternatives takes longer to compile than the tokenizer takes to build,
    so texts are searched for the first characters of the tokens only.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = frozenset(tokens) - {""}
        self._lengths = sorted(set(map(len, self._tokens)), reverse=True)
        first_characters = re.escape("".join(sorted({token[0] for token in self._tokens})))
        self._first = re.compile(f"[{first_characters}]") if first_characters else None

    def find(self, text: str) -> Iterator[tuple[int, int]]:
        """Find starts and ends of tokens from left to right; of two with one start, the longer one."""
        done = 0
        for found in self._first.finditer(text) if self._first else ():
            at = found.start()
            if at >= done:
                length = next((length for length in self._lengths if text[at : at + length] in self._tokens), 0)
                if length:
                    done = at + length
                    yield at, done
