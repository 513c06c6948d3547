"""Long messages on the screen: folded where they are pasted or shown again, whole where they are sent and kept."""

from __future__ import annotations

import json
import os
import re
import sys

import pexpect
import pytest
from support.models.tiny_directory import tiny_directory

from mlxinfer.cli.repl import terminal
from mlxinfer.cli.repl.pastes import Pastes, UnfoldedFileHistory, folded, is_long
from mlxinfer.cli.repl.shown import Shown, last_exchange
from mlxinfer.cli.repl.terminal import PlainWriter, TerminalWriter

LONG = "\n".join(f"line {number}" for number in range(500))
OTHER = "\n".join(f"row {number}" for number in range(500))


def test_a_long_text_is_folded_and_comes_back_whole():
    pastes = Pastes()
    marks = [pastes.fold(text) for text in (LONG, OTHER, LONG)]
    assert marks == ["[500 lines]", "[500 lines, 2]", "[500 lines]"]
    assert pastes.unfold(f"look at {marks[0]} and {marks[1]}!") == f"look at {LONG} and {OTHER}!"
    assert pastes.mark_before(f"look at {marks[1]}") == marks[1]
    assert pastes.mark_before("look at [500 lines") == ""


@pytest.mark.parametrize("text", ["", "hello", "a\nb\nc", "x" * 2000])
def test_a_short_text_stays_as_it_is(text):
    assert not is_long(text)
    assert Pastes().fold(text) == folded(text) == text


def test_what_stands_in_brackets_without_having_been_pasted_is_text():
    assert Pastes().unfold("[500 lines]") == "[500 lines]"


def test_the_history_keeps_the_text_itself(tmp_path):
    pastes = Pastes()
    history = UnfoldedFileHistory(str(tmp_path / "history"), pastes)
    history.append_string(f"see {pastes.fold(LONG)}")
    assert list(UnfoldedFileHistory(str(tmp_path / "history"), Pastes()).load_history_strings()) == [f"see {LONG}"]


TURNS = [
    {"role": "user", "content": LONG},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]},
    {"role": "tool", "name": "add", "content": "1"},
    {"role": "assistant", "content": "# Title\n\n" + "word " * 200 + "**end**\n"},
]


def test_answers_are_shown_again_rendered_and_whole(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    Shown(TURNS).write(TerminalWriter())
    shown = capsys.readouterr().out
    assert "line 0… [500 lines]\n" in shown
    assert "\x1b[1mend\x1b[0m" in shown
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", shown)
    assert plain.count("word") == 200
    assert 'asked for add({"a": 1})' in plain
    assert "# Title" not in plain


def test_a_pipe_gets_the_text(capsys):
    Shown([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "**so**"}]).write(PlainWriter())
    assert capsys.readouterr().out == "> hi\n**so**\n"


def test_the_last_exchange_begins_with_the_last_message():
    assert last_exchange([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, *TURNS]) == TURNS
    assert last_exchange([]) == []


def test_no_colours_without_them(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "colours", lambda: False)
    TerminalWriter().message("hi")
    assert "32m" not in capsys.readouterr().out


def test_a_paste_on_a_terminal_is_one_line_and_is_sent_whole(tmp_path, own_home):
    model = str(tiny_directory(tmp_path / "model", eos=False, context=16384))
    child = pexpect.spawn(
        sys.executable, ["-m", "mlxinfer", "chat", model, "--max-tokens", "3"], encoding="utf-8", timeout=60, dimensions=(24, 80),
        env=os.environ | {"TERM": "xterm"},
    )  # fmt: skip
    child.expect("16384 tokens")
    child.send(f"\x1b[200~{LONG}\x1b[201~")
    child.expect_exact("[500 lines]")
    child.send(" please\r")
    child.expect("stopped for length")
    assert "line 250" not in child.before
    child.send("/exit\r")
    child.expect(pexpect.EOF)
    (path,) = (own_home / "mlxinfer" / "conversations").iterdir()
    assert json.loads(path.read_text())["messages"][0]["content"] == f"{LONG} please"
