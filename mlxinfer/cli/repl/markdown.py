"""Markdown to terminal text while it is being written, append-only: what was returned once is never changed.

Paragraphs, headings, lists and quotes come out word by word, wrapped to the width; an emphasis or an inline code once it is
closed; code line by line, highlighted; a table when it is complete. The result does not depend on how the text was cut.
"""

from __future__ import annotations

import re
from io import StringIO

from rich.cells import cell_len
from rich.console import Console
from rich.markdown import Markdown

from .highlight import Highlighter
from .inline import pieces

_CODES = {"bold": "1", "dim": "2", "italic": "3", "underline": "4", "strike": "9", "code": "36"}
_INDENT = "  "

_UNDECIDED = re.compile(r"\s*(#{1,6}|[-*_=+ ]*|\d{1,9}[.)]?|>|`{1,2}|~{1,2}|(```|~~~).*|\|.*)", re.DOTALL)
_FENCE = re.compile(r"\s*(`{3,}|~{3,})([^`]*)")
_RULE = re.compile(r"\s*([-*_])(\s*\1){2,}\s*")
_HEADING = re.compile(r"\s{0,3}(#{1,6})\s+")
_QUOTE = re.compile(r"\s{0,3}> ?")
_WORD = re.compile(
    r"\s+|[{0}]|[^\s{0}]+".format("\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe4f\uff00-\uff60\uffe0-\uffe6")
)
_ITEM = re.compile(r"(\s*)([-*+]|\d{1,9}[.)])\s+")


class MarkdownStream:
    """Feed it text, write what it returns; `close` returns the rest, and ends the stream."""

    def __init__(self, width: int) -> None:
        self._width = max(width, 20)
        self._line = ""
        """The current line as long as its kind is open, and all of it in code and tables."""
        self._kind = "open"
        self._held = ""
        self._base: frozenset[str] = frozenset()
        self._margin = ""
        self._column = 0
        self._blank = True
        self._table: list[str] = []
        self._fence = ""
        self._highlighter: Highlighter | None = None

    def feed(self, text: str) -> str:
        return "".join(map(self._character, text))

    def close(self) -> str:
        out = self._end_line() if self._line or self._held or self._kind == "text" else ""
        return out + self._end_table()

    def _character(self, character: str) -> str:
        if character == "\n":
            return self._end_line()
        if self._kind == "text":
            return self._add_inline(character)
        self._line += character
        if self._kind == "open" and not _UNDECIDED.fullmatch(self._line):
            return self._begin_text()
        return ""

    def _end_line(self) -> str:
        if self._kind == "code":
            return self._end_code_line()
        if self._kind == "text":
            out = self._flush(final=True) + "\n"
            self._kind, self._blank = "open", False
            return out
        line, self._line = self._line, ""
        if line.lstrip().startswith("|"):
            self._table.append(line)
            return ""
        out = self._end_table()
        if not line.strip():
            return out + self._blank_line()
        self._blank = False
        fence = _FENCE.fullmatch(line)
        if fence:
            self._kind, self._fence, self._highlighter = "code", fence.group(1), Highlighter(fence.group(2).strip())
            return out
        if _RULE.fullmatch(line):
            return out + _styled("─" * min(self._width, 40), {"dim"}) + "\n"
        self._line = line
        return out + self._begin_text() + self._end_line()

    def _blank_line(self) -> str:
        """One blank line at most, and none at the beginning."""
        if self._blank:
            return ""
        self._blank = True
        return "\n"

    def _begin_text(self) -> str:
        """The kind of the line is known: write its marker, and what follows word by word."""
        out = self._end_table()
        line, self._line = self._line, ""
        self._kind, self._held, self._base, self._margin, marker = "text", "", frozenset(), "", ""
        if heading := _HEADING.match(line):
            self._base = frozenset({"bold", "underline"} if len(heading.group(1)) <= 2 else {"bold"})
            line = line[heading.end() :]
        elif quote := _QUOTE.match(line):
            marker = self._margin = _styled("▌ ", {"dim"})
            line = line[quote.end() :]
        elif item := _ITEM.match(line):
            marker = item.group(1) + ("•" if item.group(2) in "-*+" else item.group(2)) + " "
            self._margin = " " * len(marker)
            line = line[item.end() :]
        self._column = _visible(marker)
        return out + marker + "".join(map(self._add_inline, line))

    def _add_inline(self, character: str) -> str:
        """Text is let out at the end of a word; scripts without spaces at any wide character."""
        self._held += character
        return self._flush(final=False) if character == " " or cell_len(character) > 1 else ""

    def _flush(self, *, final: bool) -> str:
        found, self._held = pieces(self._held, final=final, styles=self._base)
        return "".join(self._wrapped(piece.text, piece.styles) for piece in found)

    def _wrapped(self, text: str, styles: frozenset[str]) -> str:
        out = ""
        for word in _WORD.findall(text):
            width = cell_len(word)
            if self._column + width > self._width and self._column > _visible(self._margin):
                out += "\n" + self._margin
                self._column = _visible(self._margin)
                if word.isspace():
                    continue
            self._column += width
            out += _styled(word, styles)
        return out

    def _end_code_line(self) -> str:
        line, self._line = self._line, ""
        if re.fullmatch(rf"\s*{re.escape(self._fence[0])}{{{len(self._fence)},}}\s*", line):
            self._kind = "open"
            return ""
        assert self._highlighter is not None
        return _INDENT + self._highlighter.line(line.expandtabs(4)) + "\n"

    def _end_table(self) -> str:
        if not self._table:
            return ""
        table, self._table, self._blank = "\n".join(self._table), [], False
        console = Console(file=StringIO(), width=self._width, force_terminal=True, color_system="standard", legacy_windows=False)
        with console.capture() as capture:
            console.print(Markdown(table))
        return capture.get().strip("\n") + "\n"


def _styled(text: str, styles: set[str] | frozenset[str]) -> str:
    if not styles or not text:
        return text
    codes = ";".join(code for name, code in _CODES.items() if name in styles)
    return f"\x1b[{codes}m{text}\x1b[0m"


def _visible(text: str) -> int:
    return cell_len(re.sub(r"\x1b\[[0-9;]*m", "", text))
