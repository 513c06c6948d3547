"""Real text of any length that every installation has: Python's language reference."""

from __future__ import annotations

from pydoc_data.topics import topics

_FIRST = ("assignment", "class", "import")


def text() -> str:
    """Technical prose in English, with some code."""
    names = [*_FIRST, *(name for name in sorted(topics) if name not in _FIRST)]
    return "".join(topics[name] for name in names)
