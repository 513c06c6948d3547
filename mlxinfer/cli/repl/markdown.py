"""Streams Markdown to a terminal. Output is append-only: returned text never changes.

Paragraphs, headings, lists and quotes arrive word by word, wrapped to the width. Emphasis, inline code and links arrive once closed, code
line by line with colours, and tables once complete. The result does not depend on the cuts of the input.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from io import StringIO
from typing import Literal

from pygments.formatters import TerminalFormatter
from pygments.lexers import TextLexer, get_lexer_by_name
from pygments.util import ClassNotFound
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text


class Highlighter:
    """Colours lines of code. The lexer sees all lines so far, so strings and comments may span several."""

    def __init__(self, language: str, *, colours: bool = True) -> None:
        self._colours = colours
        try:
            self._lexer = get_lexer_by_name(language) if language else TextLexer()
        except ClassNotFound:
            self._lexer = TextLexer()
        self._formatter = TerminalFormatter()
        self._before = ""

    def line(self, line: str) -> str:
        """Return the line with ANSI colours, without a line break."""
        if not self._colours:
            return line
        code = f"{self._before}{line}\n"  # many lexers reject a line without its break
        tokens = []
        for start, kind, value in self._lexer.get_tokens_unprocessed(code):
            overlap = value[max(len(self._before) - start, 0) : max(len(code) - 1 - start, 0)]
            if overlap:
                tokens.append((kind, overlap))
        self._before = code
        out = StringIO()
        self._formatter.format(tokens, out)
        return out.getvalue().rstrip("\n")


_ESCAPABLE = set("\\`*_{}#+-.!~|>")
"""Excludes brackets: `\\(` and `\\[` start a formula, which without backslashes would look like prose."""

_STYLES = {"***": ("bold", "italic"), "**": ("bold",), "__": ("bold",), "*": ("italic",), "_": ("italic",), "~~": ("strike",)}
_OPENING = re.compile(r"`+|\*{1,3}|_{1,2}|~~")
_LINK = re.compile(r"!?\[([^\[\]\n]*)\]\(<?([^()\s]*(?:\([^()\s]*\)[^()\s]*)*?)>?(?:\s+[\"'][^\"'\n]*[\"'])?\)")
_OPEN_LINK = re.compile(r"!?\[[^\[\]\n]*(?:\](?:\([^()\n]*(?:\([^()\n]*\)?[^()\n]*)*)?)?")
_ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,30});")

LONGEST_SPAN = 400
"""Characters after which an unclosed emphasis counts as plain text."""


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    """Characters of one style."""
    styles: frozenset[str]
    """Names of rich's styles, outermost first."""


def pieces(text: str, *, final: bool, styles: frozenset[str] = frozenset()) -> tuple[list[Piece], str]:
    """Return the styled pieces of a text, and its end if more text may change its meaning (empty if `final`)."""
    found: list[Piece] = []
    plain, at = "", 0
    while at < len(text):
        span = _span(text, at, styles)
        if span is None and not final and _unfinished(text, at) and len(text) - at < LONGEST_SPAN:
            return _with_plain(found, plain, styles), text[at:]
        if span:
            length, inside = span
            found, plain = [*_with_plain(found, plain, styles), *inside], ""
        else:
            length, shown = _plain_at(text, at)
            plain += shown
        at += length
    return _with_plain(found, plain, styles), ""


def _span(text: str, at: int, styles: frozenset[str]) -> tuple[int, list[Piece]] | None:
    """Return (length, pieces) of the closed emphasis, inline code or link at `at`, or None."""
    if link := _LINK.match(text, at):
        label, address = link.groups()
        shown = pieces(label, final=True, styles=styles | {"underline"})[0]
        return len(link.group()), shown + ([Piece(f" ({address})", styles | {"dim"})] if address and address != label else [])
    opening = _OPENING.match(text, at)
    if not opening or not _opens(text, at, opening.group()):
        return None
    mark = opening.group()
    end = _closing(text, opening.end(), mark)
    return None if end is None else (end + len(mark) - at, _inside(mark, text[opening.end() : end], styles))


def _unfinished(text: str, at: int) -> bool:
    """Return True if later text may close the mark that opens here."""
    opening = _OPENING.match(text, at)
    if opening:
        return _opens(text, at, opening.group())
    link = _OPEN_LINK.match(text, at)
    return link is not None and link.end() == len(text)


def _plain_at(text: str, at: int) -> tuple[int, str]:
    """Return (length, shown text) of the next plain text: an escaped character, an entity, or a single character."""
    if text[at] == "\\" and at + 1 < len(text):
        return 2, text[at + 1] if text[at + 1] in _ESCAPABLE else text[at : at + 2]
    if entity := _ENTITY.match(text, at):
        shown = html.unescape(entity.group()).replace("\xa0", " ")
        # An entity may name a control character, which must not reach the terminal.
        return len(entity.group()), shown if shown and shown.isprintable() else entity.group()
    step = opening.group() if (opening := _OPENING.match(text, at)) else text[at]
    return len(step), step


def _with_plain(found: list[Piece], text: str, styles: frozenset[str]) -> list[Piece]:
    return [*found, Piece(text, styles)] if text else found


def _inside(mark: str, text: str, styles: frozenset[str]) -> list[Piece]:
    if mark[0] == "`":
        code = text[1:-1] if len(text) > 2 and text[0] == text[-1] == " " else text
        return [Piece(code, styles | {"code"})]
    return pieces(text, final=True, styles=styles | set(_STYLES[mark]))[0]


def _opens(text: str, at: int, mark: str) -> bool:
    """Return True if a mark opens at `at`: not before a space, and emphasis not within a word (snake_case, 2*3)."""
    if mark[0] == "`":
        return True
    after = text[at + len(mark) : at + len(mark) + 1]
    return bool(after) and not after.isspace() and not text[at - 1 : at].isalnum()


def _closing(text: str, start: int, mark: str) -> int | None:
    """Return the position where the same mark closes, not within a longer run of its character."""
    for found in re.finditer(rf"(?<!{re.escape(mark[0])}){re.escape(mark)}(?!{re.escape(mark[0])})", text[start:]):
        at = start + found.start()
        if mark[0] == "`":
            return at
        before, after = text[at - 1], text[at + len(mark) : at + len(mark) + 1]
        if at > start and not before.isspace() and before != "\\" and not after.isalnum():
            return at
    return None


_CODES = {"bold": "1", "dim": "2", "italic": "3", "underline": "4", "strike": "9", "code": "36"}
_CODES_WITHOUT_COLOUR = _CODES | {"code": "1"}
_INDENT = "  "

_UNDECIDED = re.compile(
    r"\s*(#{1,6}|(?:[-*+]|\d{1,9}[.)])\s+\[?[ xX]?\]?|[-*_=+ ]*|\d{1,9}[.)]?|[>\s]+|`{1,2}|~{1,2}|(```|~~~).*|\|.*)", re.DOTALL
)
_FENCE = re.compile(r"\s*(`{3,}|~{3,})([^`]*)")
_RULE = re.compile(r"\s*([-*_=])(\s*\1){2,}\s*")
_HEADING = re.compile(r"\s{0,3}(#{1,6})\s+")
_QUOTE = re.compile(r"(?:\s{0,3}> ?)+")
_WORD = re.compile(
    r"\s+|[{0}]|[^\s{0}]+".format("\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe4f\uff00-\uff60\uffe0-\uffe6")
)
_ITEM = re.compile(r"(\s*)([-*+]|\d{1,9}[.)])\s+(?:\[([ xX])\]\s+)?")
_TABLE_RULE = re.compile(r"\|?(?:\s*:?-+:?\s*\|)*\s*:?-+:?\s*\|?\s*")
_CELL_END = re.compile(r"(?<!\\)\|")


class MarkdownStream:
    """Converts pieces of Markdown; `close` returns the rest and ends the stream."""

    def __init__(self, width: int, *, colours: bool = True) -> None:
        self._width = max(width, 20)
        self._colours = colours
        self._line = ""
        """The current line while its kind is unknown; in code and tables, always the whole line."""
        self._kind = "open"
        self._held = ""
        self._base: frozenset[str] = frozenset()
        self._margin = ""
        self._column = 0
        self._blank = True
        self._table: list[str] = []
        self._fence = ""
        self._highlighter: Highlighter | None = None

    @property
    def table_rows(self) -> int:
        """Number of lines of a table that is not complete yet."""
        return len(self._table)

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
            self._kind, self._fence, self._highlighter = "code", fence.group(1), Highlighter(fence.group(2).strip(), colours=self._colours)
            return out
        if _RULE.fullmatch(line):
            return out + self._styled(("═" if "=" in line else "─") * min(self._width, 40), {"dim"}) + "\n"
        self._line = line
        return out + self._begin_text() + self._end_line()

    def _blank_line(self) -> str:
        """Start a blank line, unless one precedes or nothing was written yet."""
        if self._blank:
            return ""
        self._blank = True
        return "\n"

    def _begin_text(self) -> str:
        """Write the marker of the line, whose kind is now known, and its text so far."""
        out = self._end_table()
        line, self._line = self._line, ""
        self._kind, self._held, self._base, self._margin, marker = "text", "", frozenset(), "", ""
        if heading := _HEADING.match(line):
            self._base = frozenset({"bold", "underline"} if len(heading.group(1)) <= 2 else {"bold"})
            line = line[heading.end() :]
        elif quote := _QUOTE.match(line):
            marker = self._margin = self._styled("▌ " * quote.group().count(">"), {"dim"})
            line = line[quote.end() :]
        elif item := _ITEM.match(line):
            box_ = {None: "", " ": "☐ "}.get(item.group(3), "☑ ")
            marker = item.group(1) + ("•" if item.group(2) in "-*+" else item.group(2)) + " " + box_
            self._margin = " " * len(marker)
            line = line[item.end() :]
        self._column = _visible(marker)
        return out + marker + "".join(map(self._add_inline, line))

    def _add_inline(self, character: str) -> str:
        """Add a character and return finished text: whole words, parts of overlong words, and wide characters at once."""
        self._held += character
        return self._flush(final=False) if character == " " or cell_len(character) > 1 or len(self._held) > LONGEST_SPAN else ""

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
            out += self._styled(word, styles)
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
        rows, self._table, self._blank = [_cells(line) for line in self._table], [], False
        headed = len(rows) > 1 and bool(_TABLE_RULE.fullmatch("|".join(rows[1])))
        table = Table(box=box.SIMPLE_HEAD, show_header=headed, show_edge=False, pad_edge=False)
        for i in range(max(map(len, rows))):
            title = self._cell(rows[0][i]) if headed and i < len(rows[0]) else Text()
            table.add_column(title, justify=_alignment(rows[1], i) if headed else "left", overflow="fold")
        for row in rows[2:] if headed else rows:
            table.add_row(*map(self._cell, row))
        console = Console(
            file=StringIO(),
            width=self._width,
            force_terminal=True,
            color_system="standard",
            no_color=not self._colours,
            legacy_windows=False,
        )
        with console.capture() as capture:
            console.print(table)
        return "".join(line.rstrip() + "\n" for line in capture.get().strip("\n").split("\n"))

    def _cell(self, text: str) -> Text:
        names = {"code": "cyan" if self._colours else "bold"}
        cell = Text()
        for piece in pieces(re.sub(r"<br\s*/?>", "\n", text), final=True)[0]:
            cell.append(piece.text, " ".join(names.get(style, style) for style in sorted(piece.styles)))
        return cell

    def _styled(self, text: str, styles: set[str] | frozenset[str]) -> str:
        if not styles or not text:
            return text
        codes = _CODES if self._colours else _CODES_WITHOUT_COLOUR
        return f"\x1b[{';'.join(code for name, code in codes.items() if name in styles)}m{text}\x1b[0m"


def _cells(line: str) -> list[str]:
    inner = line.strip().removeprefix("|")
    if inner.endswith("|") and not inner.endswith("\\|"):
        inner = inner[:-1]
    return [cell.strip() for cell in _CELL_END.split(inner)]


def _alignment(rule: list[str], column: int) -> Literal["left", "center", "right"]:
    dashes = rule[column] if column < len(rule) else ""
    if dashes.endswith(":"):
        return "center" if dashes.startswith(":") else "right"
    return "left"


def _visible(text: str) -> int:
    return cell_len(re.sub(r"\x1b\[[0-9;]*m", "", text))
