"""The pages of all sequences."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Growth:
    """A sequence that has computed `past` tokens is to compute `count` more."""

    slot: int | None
    past: int
    count: int
