"""Formats counts for messages."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return "1 page" for 1, "2,000 pages" for 2000; `plural` is an irregular plural."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {plural or noun + 's'}"
