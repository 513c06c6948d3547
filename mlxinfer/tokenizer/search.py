"""Search for special tokens in a text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator


class TokenSearch:
    """Searches a text for thousands of tokens. Thread-safe.

    A regular expression of that many alternatives takes longer to compile than the tokenizer takes to build. The text is therefore
    searched for the tokens' first characters only.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = frozenset(tokens) - {""}
        self._lengths = sorted(set(map(len, self._tokens)), reverse=True)
        first_characters = re.escape("".join(sorted({token[0] for token in self._tokens})))
        self._first = re.compile(f"[{first_characters}]") if first_characters else None

    def find(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of each token from left to right; of two with the same start, the longer one."""
        done = 0
        for found in self._first.finditer(text) if self._first else ():
            at = found.start()
            if at >= done:
                length = next((length for length in self._lengths if text[at : at + length] in self._tokens), 0)
                if length:
                    done = at + length
                    yield at, done
