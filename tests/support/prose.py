"""Measures prose: sentences of Markdown, wide lines, and docstrings that open with a question word."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

_QUESTION = re.compile(r"(What|Whether|How|Which|Where)\b")
_FENCE = re.compile(r"```+|~~~+")
_ITEM = re.compile(r"(?:[-*+]|\d+[.)])\s+(.*)")
_NOT_PROSE = ("#", "|", "<", "![", ":::", "!!!", "???")
_RULE = re.compile(r"[-=*_ ]{3,}")
_SENTENCE_END = re.compile(r"(?<=[.!?])[)\"”]?\s+(?=[^a-z])")


def question_docstrings(source: str) -> list[str]:
    """First lines of the docstrings in Python `source` that start with What, Whether, How, Which or Where.

    A string that stands alone after a field counts as its docstring.
    """
    texts = [
        statement.value.value.strip()
        for node in ast.walk(ast.parse(source))
        for statement in (node.body if isinstance(getattr(node, "body", None), list) else ())  # type: ignore[attr-defined]
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)
    ]
    return [text.splitlines()[0] for text in texts if _QUESTION.match(text)]


def prose_lines(text: str) -> Iterator[str]:
    """Lines of Markdown `text` outside front matter, comments and fenced code; fences become empty lines."""
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    fence = None
    for line in text.splitlines():
        mark = _FENCE.match(line.strip())
        if fence is not None:
            fence = None if mark and mark[0].startswith(fence) else fence
        elif mark:
            fence = mark[0]
            yield ""
        else:
            yield line


def _paragraphs(text: str) -> Iterator[str]:
    """Paragraphs and list items, each as one line; headings, tables and indented code are left out."""
    words: list[str] = []
    for line in (*prose_lines(text), ""):
        stripped = line.strip()
        item = _ITEM.match(stripped)
        outside = not stripped or stripped.startswith(_NOT_PROSE) or _RULE.fullmatch(stripped) is not None
        if (outside or item) and words:
            yield " ".join(words)
            words = []
        if outside or (line.startswith("    ") and not words and not item):
            continue
        words.append(item[1] if item else stripped.lstrip("> "))


def sentences(text: str) -> Iterator[str]:
    """Sentences of Markdown `text`; code counts as one word, a link as its text."""
    for paragraph in _paragraphs(text):
        plain = re.sub(r"`[^`]*`", "CODE", paragraph)
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", plain)
        plain = plain.replace("**", "").replace("e.g.", "eg").replace("i.e.", "ie")
        yield from (found for found in _SENTENCE_END.split(plain) if word_count(found))


def word_count(sentence: str) -> int:
    """Words in `sentence`: parts between spaces with a letter or a digit."""
    return sum(re.search(r"\w", part) is not None for part in sentence.split())


def wide_lines(text: str, columns: int) -> list[str]:
    """Prose lines longer than `columns`; tables and lines with a link do not count."""
    return [line for line in prose_lines(text) if len(line) > columns and not line.lstrip().startswith("|") and "](" not in line]


def percentile_90(counts: Sequence[int]) -> int:
    """The value at nine tenths of the sorted `counts`."""
    return sorted(counts)[int(len(counts) * 0.9)]


def python_files(*folders: Path) -> list[Path]:
    """Python files below `folders`, each once, although `mlxinfer` links to other folders."""
    return sorted({file.resolve() for folder in folders for file in folder.rglob("*.py")})
