"""Numbers in the words that people read."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str = "") -> str:
    """1 -> "1 page", 2000 -> "2,000 pages". `plural` is for nouns that take more than an s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {plural or noun + 's'}"
