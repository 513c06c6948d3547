"""Texts that go through a model together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BATCH = 4096
"""Tokens that go through a block at once, or one text if it is longer."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts that are read together."""

    texts: list[Sequence[int]]
    """Token ids of each."""
    held_out: bool = False
    """Whether they are kept aside, to judge by."""

    @property
    def tokens(self) -> list[int]:
        """The token ids of all texts, one after another."""
        return [token for text in self.texts for token in text]


def batches(texts: Sequence[Sequence[int]], *, held_out: int = 0, size: int = BATCH) -> list[Batch]:
    """Texts in order in batches of about `size` tokens, the last `held_out` of them apart."""
    found: list[Batch] = []
    for number, text in enumerate(texts):
        aside = number >= len(texts) - held_out
        if not found or found[-1].held_out != aside or len(found[-1].tokens) + len(text) > size:
            found.append(Batch([], aside))
        found[-1].texts.append(text)
    return found
