"""Code, coloured line by line."""

from __future__ import annotations

from io import StringIO

from pygments.formatters import TerminalFormatter
from pygments.lexers import TextLexer, get_lexer_by_name
from pygments.util import ClassNotFound


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
