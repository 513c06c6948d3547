"""Markdown to terminal text while it is being written, append-only: what was returned once is never changed.

Paragraphs, headings, lists and quotes come out word by word, wrapped to the width; an emphasis or an inline code once it is
closed; code line by line, highlighted; a table when it is complete. The result does not depend on how the text was cut.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from io import StringIO

from pygments.formatters import TerminalFormatter
from pygments.lexers import TextLexer, get_lexer_by_name
from pygments.util import ClassNotFound
from rich.cells import cell_len
from rich.console import Console
from rich.markdown import Markdown


class Highlighter:
    """Colours lines as they come. The lexer sees all lines so far, so a string or a comment may go over several."""

    def __init__(self, language: str) -> None:
        try:
            self._lexer = get_lexer_by_name(language, stripnl=False, ensurenl=False) if language else TextLexer(ensurenl=False)
        except ClassNotFound:
            self._lexer = TextLexer(ensurenl=False)
        self._formatter = TerminalFormatter()
        self._before = ""

    def line(self, line: str) -> str:
        """The line with ANSI colours, without a line break."""
        code = self._before + line
        tokens = []
        for start, kind, value in self._lexer.get_tokens_unprocessed(code):
            overlap = value[max(len(self._before) - start, 0) :]
            if start + len(value) > len(self._before) and overlap:
                tokens.append((kind, overlap))
        self._before = code + "\n"
        out = StringIO()
        self._formatter.format(tokens, out)
        return out.getvalue().rstrip("\n")


_ESCAPABLE = set("\\`*_{}[]()#+-.!~|>")
_STYLES = {"***": ("bold", "italic"), "**": ("bold",), "__": ("bold",), "*": ("italic",), "_": ("italic",), "~~": ("strike",)}
_OPENING = re.compile(r"`+|\*{1,3}|_{1,2}|~~")

LONGEST_SPAN = 400
"""Characters after which an emphasis that was not closed is taken for plain text."""


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    styles: frozenset[str]


def pieces(text: str, *, final: bool, styles: frozenset[str] = frozenset()) -> tuple[list[Piece], str]:
    """The styled pieces of a text, and its end that more text may still turn into something else (empty if `final`)."""
    found: list[Piece] = []
    plain, at = "", 0
    while at < len(text):
        if text[at] == "\\" and at + 1 < len(text) and text[at + 1] in _ESCAPABLE:
            plain, at = plain + text[at + 1], at + 2
            continue
        opening = _OPENING.match(text, at)
        if not opening or not _opens(text, at, opening.group()):
            step = opening.group() if opening else text[at]
            plain, at = plain + step, at + len(step)
            continue
        mark = opening.group()
        end = _closing(text, opening.end(), mark)
        if end is None:
            if not final and len(text) - at < LONGEST_SPAN:
                return _with_plain(found, plain, styles), text[at:]
            plain, at = plain + mark, opening.end()
            continue
        found = _with_plain(found, plain, styles)
        found += _inside(mark, text[opening.end() : end], styles)
        plain, at = "", end + len(mark)
    return _with_plain(found, plain, styles), ""


def _with_plain(found: list[Piece], text: str, styles: frozenset[str]) -> list[Piece]:
    return [*found, Piece(text, styles)] if text else found


def _inside(mark: str, text: str, styles: frozenset[str]) -> list[Piece]:
    if mark[0] == "`":
        code = text[1:-1] if len(text) > 2 and text[0] == text[-1] == " " else text
        return [Piece(code, styles | {"code"})]
    return pieces(text, final=True, styles=styles | set(_STYLES[mark]))[0]


def _opens(text: str, at: int, mark: str) -> bool:
    """A mark opens before something that is no space; emphasis does not open inside a word (snake_case, 2*3)."""
    if mark[0] == "`":
        return True
    after = text[at + len(mark) : at + len(mark) + 1]
    return bool(after) and not after.isspace() and not text[at - 1 : at].isalnum()


def _closing(text: str, start: int, mark: str) -> int | None:
    """Where the same mark closes again, and not just as part of a longer run of its character."""
    for found in re.finditer(rf"(?<!{re.escape(mark[0])}){re.escape(mark)}(?!{re.escape(mark[0])})", text[start:]):
        at = start + found.start()
        if mark[0] == "`":
            return at
        before, after = text[at - 1], text[at + len(mark) : at + len(mark) + 1]
        if at > start and not before.isspace() and before != "\\" and not after.isalnum():
            return at
    return None


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
