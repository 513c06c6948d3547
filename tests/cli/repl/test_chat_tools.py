"""`mlxinfer chat --tools` on a real terminal: each call is shown, asked about and answered."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest
from support.models.tiny_directory import JSON_CHARACTERS, tiny_directory
from support.processes.terminal import end

from mlxinfer.cli.repl.tools import ToolRunner, tools_of_file
from mlxinfer.errors import PromptError
from mlxinfer.types import ToolCall

CTRL_C, CTRL_D = "\x03", "\x04"
FILE = '''
from pathlib import Path
from typing import Literal
LOG = Path(__file__).with_name("log.txt")

def add(a: Literal[1, 5, 6, 7, 40], b: Literal[2] = 2) -> int:
    """Add two numbers."""
    LOG.write_text(f"{a} {b}")
    return a + b

def fail(reason: str) -> str:
    """Fail."""
    raise OSError(reason)

def untyped(x): ...
def _private(x: int) -> int: ...
'''


@pytest.fixture
def tools_file(tmp_path: Path) -> Path:
    path = tmp_path / "own_tools.py"
    path.write_text(FILE)
    return path


def test_the_typed_public_functions_of_a_file_are_offered(tools_file, tmp_path):
    tools = tools_of_file(tools_file)
    assert list(tools) == ["add", "fail"]
    assert tools["add"].parameters.schema["required"] == ["a"]
    for content, words in (("def f(x): ...", "no function with annotated"), ("1 / 0", "ZeroDivisionError"), ("def (:", "SyntaxError")):
        (tmp_path / "bad.py").write_text(content)
        with pytest.raises(PromptError, match=words):
            tools_of_file(tmp_path / "bad.py")


def test_calls_run_only_if_the_user_agrees(tools_file, capsys):
    answers = iter(["what?", "y", "n", "always"])
    runner = ToolRunner(tools_of_file(tools_file), lambda question: next(answers))
    log = tools_file.with_name("log.txt")
    assert runner.result(ToolCall("1", "add", '{"a": 1}')) == "3"
    assert log.read_text() == "1 2"
    assert "declined" in runner.result(ToolCall("2", "add", '{"a": 5}'))
    assert log.read_text() == "1 2"
    assert runner.result(ToolCall("3", "add", '{"a": 6}')) == "8"
    assert runner.result(ToolCall("4", "add", '{"a": 7}')) == "9", "not asked again"
    shown = capsys.readouterr().err
    assert "add(a=1)" in shown
    assert shown.count("declined") == 1


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, EOFError])
def test_ctrl_c_and_ctrl_d_decline(tools_file, interrupt):
    def ask(question: str) -> str:
        raise interrupt

    assert "declined" in ToolRunner(tools_of_file(tools_file), ask).result(ToolCall("1", "add", '{"a": 1}'))


def test_errors_are_told_to_the_model(tools_file):
    runner = ToolRunner(tools_of_file(tools_file), lambda question: "y")
    assert runner.result(ToolCall("1", "fail", '{"reason": "no disk"}')) == "Error: fail failed: OSError: no disk"
    assert runner.result(ToolCall("2", "add", '{"b": 1}')).startswith("Error: add cannot be called with these arguments")


@pytest.fixture
def start(tmp_path: Path, own_home: Path, tools_file: Path) -> Iterator[Callable[..., pexpect.spawn]]:
    """A chat whose first tokens are given by a bias: the tiny model has to begin a call, which is then held to the one tool."""
    model = tiny_directory(tmp_path / "tiny", "qwen3", characters=JSON_CHARACTERS, context=4096)
    started = []

    def begin(*arguments: str) -> pexpect.spawn:
        variables = os.environ | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        driver = Path(__file__).with_name("forced_call.py")
        command = [str(driver), str(model), "chat", str(model), "--tools", str(tools_file), "--temperature", "0", *arguments]
        child = pexpect.spawn(sys.executable, command, env=variables, encoding="utf-8", dimensions=(24, 200), timeout=60)
        started.append(child)
        child.expect("/help lists the commands")
        return child

    yield begin
    for child in started:
        end(child)


@pytest.mark.long
def test_a_call_is_shown_asked_about_and_answered(start, tools_file):
    child = start("--max-tokens", "120")
    child.send("hello\r")
    child.expect(r"the model asks for add\(a=")
    child.expect("run it")
    child.send("y\r")
    child.expect(r"tok/s|stopped")
    assert tools_file.with_name("log.txt").exists()
    child.send(CTRL_D)
    child.expect(pexpect.EOF)


@pytest.mark.long
def test_ctrl_c_at_the_question_declines(start, tools_file):
    child = start("--max-tokens", "120")
    child.send("hello\r")
    child.expect("run it")
    child.send(CTRL_C)
    child.expect("declined")
    child.expect(r"tok/s|stopped")
    assert not tools_file.with_name("log.txt").exists()


def test_a_pipe_cannot_be_asked(call, chat_model, tools_file):
    found = call("chat", chat_model, "--tools", str(tools_file), stdin="hello\n")
    assert found.code == 2
    assert "needs a terminal" in found.err


def test_a_call_is_shown_whole(tools_file, capsys):
    """A long argument does not hide the call from the user who must agree to it."""
    hidden = json.dumps({"a": 1, "b": "x " * 3000 + "the end"})
    ToolRunner(tools_of_file(tools_file), lambda question: "n").result(ToolCall("1", "add", hidden))
    assert "the end" in capsys.readouterr().err
