"""The chat on a real terminal: keys in, screen out."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest
from support.models.tiny_directory import tiny_directory
from support.processes.terminal import end

CTRL_C, CTRL_D, ALT_ENTER = "\x03", "\x04", "\x1b\r"
BRACKETED_PASTE = "\x1b[200~{}\x1b[201~"
ANSWERING = r"\x1b\[2mreading[^\x1b]*\x1b\[0m\r\x1b\[K"
"""The note about reading gives way: there is a first token."""


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_directory(tmp_path_factory.mktemp("models") / "long", eos=False, context=100_000))


@pytest.fixture
def chat(endless: str, own_home: Path) -> Iterator[Callable[..., pexpect.spawn]]:
    started = []

    def start(*arguments: str, rows: int = 24, **environment: str) -> pexpect.spawn:
        # A terminal that answers no questions about itself: the line editor must not wait for replies.
        variables = os.environ | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"} | environment
        command = ["-m", "mlxinfer", "chat", endless, "--temperature", "0", "--no-stop-on-loop", *arguments]
        child = pexpect.spawn(sys.executable, command, env=variables, encoding="utf-8", dimensions=(rows, 80), timeout=60)
        started.append(child)
        child.expect("/help lists the commands")
        return child

    yield start
    for child in started:
        end(child)


def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves(chat, own_home):
    child = chat("--max-tokens", "90000", "--no-stop-on-loop")
    child.send("hello\r")
    child.expect(ANSWERING)
    child.send(CTRL_C)
    child.expect("Stopped")
    child.send("/set max_tokens 5\r")
    child.expect("max_tokens +5")
    child.send("again\r")
    child.expect("stopped for length")
    child.send(CTRL_D)
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 0
    history = own_home / "mlxinfer" / "history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert re.findall(r"^\+(.*)", history.read_text(), re.MULTILINE) == ["hello", "/set max_tokens 5", "again"]


@pytest.mark.long
def test_ctrl_c_twice_at_the_prompt_leaves(chat):
    child = chat()
    child.send(CTRL_C)
    child.expect("Ctrl-C again")
    child.send(CTRL_C)
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 130


@pytest.mark.long
def test_lines_can_be_continued(chat, tmp_path):
    child = chat("--max-tokens", "3")
    for text in (f"a{ALT_ENTER}b\r", "c\\\rd\r", '"""e\rf"""\r'):
        child.send(text)
        child.expect("stopped for length")
    child.send(f"/save {tmp_path}/talk.json\r")
    child.expect("saved to")
    child.send("/exit\r")
    child.expect(pexpect.EOF)
    said = [turn["content"] for turn in json.loads((tmp_path / "talk.json").read_text())["messages"] if turn["role"] == "user"]
    assert said == ["a\nb", "c\nd", "e\nf"]


@pytest.mark.long
def test_the_bar_tells_how_full_the_context_is(chat):
    child = chat("--max-tokens", "3", PROMPT_TOOLKIT_NO_CPR="")
    for used in ("0", r"[1-9]\d"):
        child.expect(r"\x1b\[6n")
        child.send("\x1b[1;1R")
        child.expect(rf" {used} / 100000 tokens")
        child.send("hello\r")


def test_commands_are_completed(chat):
    child = chat()
    child.send("/st")
    child.expect("/stats")
    child.send("\t\r")
    child.expect("context 0 of 100000")


def colours_in(text: str) -> list[str]:
    return re.findall(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9\d)(?:;\d+)*m", text)


@pytest.mark.long
def test_no_color_keeps_the_layout_and_drops_the_colours(chat):
    child = chat("--max-tokens", "12", NO_COLOR="1")
    child.send("hello\r")
    child.expect(ANSWERING)
    child.send("/fly\r")
    child.expect("Unknown command /fly")
    child.send(CTRL_D)
    child.expect(pexpect.EOF)
    assert colours_in(child.before) == []


@pytest.mark.long
def test_a_dumb_terminal_gets_no_escape_sequences(chat):
    child = chat("--max-tokens", "12", TERM="dumb")
    child.sendline("hello")
    child.expect("stopped for length")
    child.sendline("/fly")
    child.expect("Unknown command /fly")
    child.sendline("/exit")
    child.expect(pexpect.EOF)
    assert "\x1b" not in child.before


@pytest.mark.long
def test_keys_are_not_echoed_into_an_answer_and_come_next(chat):
    child = chat("--max-tokens", "90000", "--no-stop-on-loop")
    child.send("hello\r")
    child.expect(ANSWERING)
    child.send("/set max_tokens 7\r")
    child.send(CTRL_C)
    child.expect("Stopped")
    assert "/set" not in child.before
    child.expect("max_tokens +7")


@pytest.mark.long
def test_a_message_that_was_never_answered_comes_back(chat, tmp_path):
    child = chat("--max-tokens", "5")
    child.send(BRACKETED_PASTE.format("hello " * 9000) + "\r")
    child.expect("reading…")
    child.send(CTRL_C)
    child.expect("the message is back at the prompt")
    child.send("\x15")  # Ctrl-U empties the line
    child.send("/stats\r")
    child.expect("context 0 of 100000")


@pytest.mark.long
@pytest.mark.parametrize("rows", [6, 8, 9])
def test_small_terminals_show_answers_and_have_no_room_for_suggestions(chat, rows):
    child = chat("--max-tokens", "5", rows=rows, LINES="24")  # as of a terminal from which this one was opened
    child.send("hello\r")
    child.expect("stopped for length")
    child.send("/sta\t")
    child.expect("ts")
    child.send("\r")
    child.expect("of 100000 tokens")
    assert "too small" not in child.before


def test_ctrl_z_at_the_prompt_is_no_text(endless):
    variables = os.environ | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "PS1": "$ "}
    shell = pexpect.spawn("/bin/sh", ["-i"], env=variables, encoding="utf-8", dimensions=(24, 200), timeout=60)
    shell.sendline(f"{sys.executable} -m mlxinfer chat {endless}")
    shell.expect("/help lists the commands")
    shell.send("hel\x1a")
    shell.expect("(?i)stopped|suspended")
    shell.sendline("fg")
    shell.expect("hel")
    shell.send("\x15/stats\r")  # Ctrl-U empties the line
    shell.expect("context 0 of 100000")
    shell.send("/exit\r")
    shell.sendline("exit")
    end(shell)


@pytest.mark.long
def test_conversations_on_a_terminal_are_kept(chat, own_home):
    child = chat("--max-tokens", "90000", "--no-stop-on-loop")
    child.send("hello\r")
    child.expect(ANSWERING)
    child.kill(signal.SIGHUP)
    child.expect(pexpect.EOF)
    (path,) = (own_home / "mlxinfer" / "conversations").iterdir()
    turns = json.loads(path.read_text())["messages"]
    assert [turn["role"] for turn in turns] == ["user", "assistant"]
    child = chat("--continue")
    child.expect("2 messages")  # what was said is shown again
    child.expect("> hello|\x1b\\[0m hello")
    child.send("/history\r")
    child.expect("2 messages: hello")
    for command, answer, told in (("/delete 1", "n", "Kept"), ("/delete 1", "y", "This is the present"), ("/new", "", "New conv")):
        child.send(f"{command}\r")
        if answer:
            child.expect("Delete .* 2 messages: hello \\[y/N\\]")
            child.send(f"{answer}\r")
        child.expect(told)
    child.send("/delete 1\r")
    child.expect("\\[y/N\\]")
    child.send("y\r")
    child.expect("Deleted")
    assert not path.exists()


@pytest.mark.long
def test_impatient_ctrl_c_does_not_end_the_program(chat):
    child = chat("--max-tokens", "90000", "--no-stop-on-loop")
    child.send("hello\r")
    child.expect(ANSWERING)
    child.send(CTRL_C * 3)
    child.send("/stats\r")
    child.expect("context [0-9]+ of 100000")
