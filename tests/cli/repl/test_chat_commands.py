"""/retry, /edit, /copy, /model, /tokens, files in messages, and room in a context that is full."""

from __future__ import annotations

import base64
import os
import sys
from pathlib import Path

import pexpect
import pytest
from support.models.tiny_directory import tiny_directory
from support.processes.terminal import end

from mlxinfer import LLM, SamplingParams
from mlxinfer.cli.repl import commands
from mlxinfer.cli.repl.attachments import named_pictures, with_files
from mlxinfer.cli.repl.commands import Session
from mlxinfer.cli.repl.conversation import Conversation
from mlxinfer.config import CHAT_TEMPERATURE
from mlxinfer.errors import MLXInferError, PromptError

PARAMS = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm(chat_model):
    with LLM(chat_model) as llm:
        yield llm


@pytest.fixture
def conversation(llm):
    return Conversation(llm, PARAMS)


def say(conversation: Conversation, text: str) -> str:
    return "".join(chunk.text for chunk in conversation.ask(text))


def test_retry_answers_again_in_place_of_the_last_answer(conversation):
    say(conversation, "hello")
    before = say(conversation, "go on")
    again = "".join(chunk.text for chunk in commands.obey(Session(conversation), "/retry"))
    assert again == before
    assert [turn["content"] for turn in conversation.turns[2:]] == ["go on", again]
    conversation.set("temperature", 1.0)
    conversation.set("seed", 3)
    other = "".join(chunk.text for chunk in conversation.retry())
    assert conversation.turns[-1]["content"] == other != before


def test_a_retry_samples_unless_a_temperature_was_set(llm, capsys):
    conversation = Conversation(llm, SamplingParams(max_tokens=8, seed=5))
    assert conversation.effective_params.temperature == CHAT_TEMPERATURE
    first = say(conversation, "hello")
    answers = ["".join(chunk.text for chunk in commands.obey(Session(conversation), "/retry")) for _ in range(2)]
    assert len({first, *answers}) == 3, "each with a seed of its own"
    assert say(Conversation(llm, SamplingParams(max_tokens=8, seed=5)), "hello") == first
    assert capsys.readouterr().err == ""
    conversation.set("temperature", 0)
    assert "".join(chunk.text for chunk in commands.obey(Session(conversation), "/retry"))
    assert "temperature is 0, so the answer will be the same" in capsys.readouterr().err


def test_a_retry_that_is_stopped_at_once_keeps_the_answer(conversation):
    say(conversation, "hello")
    before, used = list(conversation.turns), conversation.context_used
    chunks = conversation.retry()
    conversation._llm, llm = None, conversation._llm  # fails before the first token
    with pytest.raises(AttributeError):
        next(chunks)
    conversation._llm = llm
    assert (conversation.turns, conversation.context_used, conversation.draft) == (before, used, "")


def test_there_is_nothing_to_retry_or_copy(conversation):
    with pytest.raises(PromptError, match="Nothing to retry"):
        next(commands.obey(Session(conversation), "/retry"))
    with pytest.raises(MLXInferError, match="Nothing to copy"):
        commands.obey(Session(conversation), "/copy")


def test_tokens_and_model(conversation):
    conversation.system = "Be brief."
    say(conversation, "hello")
    lines = commands.obey(Session(conversation), "/tokens").split("\n")
    assert lines[0].split() == ["9", "system", "message"]
    assert lines[1].split() == ["5", "user:", "hello"]
    assert lines[-1].strip() == f"{conversation.context_used}  of {conversation.context_size} tokens used"
    assert commands.obey(Session(conversation), "/tokens abc") == "3 tokens"
    assert conversation.name in commands.obey(Session(conversation), "/model")
    with pytest.raises(MLXInferError, match="only this model"):
        commands.obey(Session(conversation), "/model other")


def test_another_model_goes_on_and_one_that_cannot_changes_nothing(call, tmp_path):
    first, second = (str(tiny_directory(tmp_path / name, rounded=True)) for name in ("first", "second"))
    speechless = str(tiny_directory(tmp_path / "speechless", chat=False, rounded=True))
    lines = ["hello", f"/model {second}", "go on", "/model nowhere", "/model", f"/model {speechless}", "/model"]
    result = call("chat", first, "--temperature", "0", "--max-tokens", "6", stdin="\n".join(lines) + "\n")
    assert result.code == 2
    assert len(result.out.splitlines()) == 2
    assert "Now talking to second (" in result.err
    assert "nowhere" in result.err
    assert "speechless has no chat template" in result.err
    assert result.err.count("second: ") == 2


def test_files_that_a_message_names_come_with_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("notes.md").write_text("one ``` two\n")
    Path("with space.txt").write_text("three")
    text, told = with_files('Compare @notes.md, @"with space.txt" and @nothing for me@example.org.')
    assert text == (
        'Compare @notes.md, @"with space.txt" and @nothing for me@example.org.\n\n'
        "notes.md:\n````\none ``` two\n````\n\nwith space.txt:\n```\nthree\n```"
    )
    assert told == ["notes.md (12 B)", "with space.txt (5 B)"]
    Path("picture.png").write_bytes(b"\x89PNG\0")
    assert with_files("@picture.png") == ("@picture.png", [])
    assert named_pictures("@picture.png, @notes.md and @nothing.png") == [Path("picture.png")]
    Path("program").write_bytes(b"\x7fELF\0")
    with pytest.raises(PromptError, match=r"program is not text"):
        with_files("@program")
    os.truncate("notes.md", 3_000_000)
    with pytest.raises(PromptError, match=r"too large for a message: 3\.0 MB"):
        with_files("@notes.md")


def test_a_system_message_from_a_file(call, chat_model, tmp_path):
    (tmp_path / "role.txt").write_text("Be brief.")
    result = call("chat", chat_model, "--system", f"@{tmp_path / 'role.txt'}", stdin="/system\n")
    assert "system: Be brief." in result.err
    result = call("chat", chat_model, "--system", "@/nowhere", stdin="")
    assert (result.code, result.err.strip()) == (2, "mlxinfer: cannot read /nowhere: No such file or directory")
    assert call("run", chat_model, "hello", "--system", f"@{tmp_path / 'role.txt'}", "--max-tokens", "2").code == 0


def test_the_oldest_messages_make_room(conversation):
    while conversation.context_used < conversation.context_size * 3 // 4:
        say(conversation, "hello, how are you today?")
    before = len(conversation.turns)
    text = "x" * (conversation.context_size // 2)
    dropped = conversation.make_room(text)
    assert 0 < dropped < before // 2
    assert len(conversation.turns) == before - 2 * dropped
    assert say(conversation, text)
    kept = list(conversation.turns)
    assert conversation.make_room("x" * conversation.context_size) == 0
    assert conversation.turns == kept


@pytest.fixture
def terminal(tmp_path, own_home):
    model = tiny_directory(tmp_path / "model", eos=False, context=400)
    (tmp_path / "editor").write_text('#!/bin/sh\nprintf \'edited %s\' "$(cat "$1")" > "$1"\n')
    (tmp_path / "editor").chmod(0o700)
    variables = os.environ | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "EDITOR": str(tmp_path / "editor")}
    variables = {name: value for name, value in variables.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY", "VISUAL")}
    command = ["-m", "mlxinfer", "chat", str(model), "--temperature", "0", "--max-tokens", "4"]
    child = pexpect.spawn(sys.executable, command, env=variables, encoding="utf-8", dimensions=(24, 100), timeout=60)
    child.expect("/help lists the commands")
    yield child
    end(child)


def test_on_a_terminal(terminal):
    """The editor, the clipboard by way of the terminal, and a context that overflows."""
    terminal.send("hello\r")
    terminal.expect("stopped for length")
    terminal.send("/edit\r")
    terminal.expect("stopped for length")
    terminal.send("/undo\r")
    terminal.expect("Removed: edited hello")
    terminal.send("\r")
    terminal.expect("stopped for length")
    terminal.send("/copy\r")
    terminal.expect(r"\x1b\]52;c;([A-Za-z0-9+/=]*)\x07")
    assert len(base64.b64decode(terminal.match.group(1)).decode()) == 4
    terminal.expect("copied 4 characters")
    for letter in "ab":
        terminal.send(letter * 180 + "\r")
        terminal.expect("stopped for length|the context is full: dropped the oldest")
    if "context is full" not in terminal.after:
        terminal.send("c" * 180 + "\r")
        terminal.expect("the context is full: dropped the oldest")
    terminal.expect("stopped for length")
