"""HTML elements in the notebook's colours, light or dark: styles, shaded tokens and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

MUTED = "opacity:0.65;font-size:85%"
TEXT = "white-space:pre-wrap;max-width:50em;line-height:1.6"
CELL = "text-align:left;padding:1px 1em 1px 0;vertical-align:top"


def shaded(text: str, chance: float | None, more: str = "") -> str:
    """Return a token, shaded more strongly the less likely it was; likely tokens and None stay plain. `more` is HTML for the tooltip."""
    if chance is None:
        return escape(text)
    shade = f"background:rgba(224,108,52,{0.55 * (1 - chance):.2f});border-radius:3px" if chance < 0.95 else ""
    return f'<span style="{shade}" title="{chance:.1%}{more}">{escape(text)}</span>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return rows of text as an escaped HTML table."""

    def line(cells: Sequence[str], kind: str) -> str:
        return "<tr>" + "".join(f'<{kind} style="{CELL}">{escape(cell)}</{kind}>' for cell in cells) + "</tr>"

    top = line(head, "th") if any(head) else ""
    return f"<table>{top}{''.join(line(row, 'td') for row in rows)}</table>"
