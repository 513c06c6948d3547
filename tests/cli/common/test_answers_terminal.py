"""Answers of `mlxinfer run` on a terminal: wrapped between words, and a line of what is going on before there is text."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pexpect
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from mlxinfer.cli.common.answers import WordStream
from mlxinfer.cli.common.waiting import Progress

TEXT = "The quick brown fox jumps over the lazy dog, and couldn't disappear."


def wrapped(text: str, width: int = 20, cut: int | None = None) -> str:
    stream = WordStream(lambda: width)
    size = cut or len(text) or 1
    return "".join(stream.feed(text[i : i + size]) for i in range(0, len(text), size)) + stream.close()


def test_no_word_is_broken():
    assert wrapped(TEXT).split("\n") == ["The quick brown fox", "jumps over the lazy", "dog, and couldn't", "disappear."]


@given(st.text(alphabet="ab \n`é漢", max_size=120), st.integers(1, 9), st.integers(2, 30))
def test_nothing_is_lost_however_the_text_is_cut(text, cut, width):
    assert wrapped(text, width, cut) == wrapped(text, width)
    assert re.sub(r"\s", "", wrapped(text, width)) == re.sub(r"\s", "", text)
    if "```" not in text:
        lines = wrapped(text, width).split("\n")
        assert all(cell_len(line.rstrip()) <= width or len(line.split()) == 1 for line in lines)


def test_code_keeps_its_lines():
    block = "```python\nprint('a line that is far longer than the terminal')\n```\n"
    assert wrapped(block) == block
    assert wrapped(block + TEXT) == block + wrapped(TEXT)


def test_scripts_without_spaces_are_wrapped_anywhere():
    assert wrapped("漢字" * 10, 8).split("\n") == ["漢字漢字"] * 5


def test_indentation_stays():
    assert wrapped("    a b", 20) == "    a b"


def test_reading_says_how_long_it_takes():
    counts = iter([None, (0, 6000), (3000, 6000)])
    progress = Progress(lambda: next(counts))
    assert progress.note() == "reading…"
    assert progress.note() == "reading 6,000 tokens…"
    assert re.fullmatch(r"reading 6,000 tokens, \d+ s left", progress.note())
    progress.writing = True
    assert progress.note() == "writing…"


@pytest.fixture
def run(chat_model):
    return [sys.executable, "-m", "mlxinfer", "run", chat_model, "hello", "--temperature", "0", "--max-tokens", "5"]


def test_on_a_terminal_there_is_a_line_before_the_answer(run):
    child = pexpect.spawn(run[0], run[1:], encoding="utf-8", timeout=60, dimensions=(24, 60), env=os.environ | {"TERM": "xterm"})
    child.expect_exact("reading")
    child.expect_exact("\r\x1b[K")  # erased
    child.expect("stopped for length")
    child.expect(pexpect.EOF)


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {}], ids=["dumb", "pipe"])
def test_nothing_is_drawn_where_it_cannot_be_erased(run, variables):
    done = subprocess.run(run, env=os.environ | variables, capture_output=True, text=True, check=True, timeout=60)
    assert "reading" not in done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr
