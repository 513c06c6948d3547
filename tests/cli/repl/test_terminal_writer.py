"""Screen of a chat while a model thinks, completion and history of its line editor, and hints for a first use."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pexpect
import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from support.models.tiny_directory import tiny_directory

from mlxinfer import LLM, MLXInferError, SamplingParams
from mlxinfer.cli.common import waiting
from mlxinfer.cli.repl.commands import COMMANDS, Session, obey
from mlxinfer.cli.repl.conversation import Conversation
from mlxinfer.cli.repl.reader import _CommandCompleter
from mlxinfer.cli.repl.saved import Archive
from mlxinfer.cli.repl.terminal import TerminalWriter, newest_words


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_directory(tmp_path_factory.mktemp("models") / "tiny", eos=False, context=2048)


@pytest.fixture
def written(monkeypatch):
    """Return the output of a writer as one list, with notes only on request."""
    pieces: list[str] = []
    monkeypatch.setattr(waiting, "_write", lambda stream, text: pieces.append(text))
    monkeypatch.setattr(waiting, "NOTE_S", 60.0)
    return pieces


def test_folded_thinking_is_one_line_of_its_newest_words(written, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    out = TerminalWriter(lambda: True)
    out.begin(lambda: "reading…")
    out.reasoning("First I look at the question, and then at the answer.\n\nIt is Paris, surely.")
    out._line.show()
    assert written[-1] == "\r\x1b[K\x1b[2mthinking… answer. It is Paris, surely.\x1b[0m"
    out.text("Paris.")
    out.end()
    shown = "".join(written).replace("\r\x1b[K", "")
    assert shown.count("It is Paris") == 1
    assert re.search(r"thought for \d+ s: 15 words \(/thinking shows them\)\x1b\[0m\n.*Paris\.", shown, re.DOTALL)


def test_full_thinking_is_dim_and_apart(written):
    out = TerminalWriter()
    out.begin(lambda: "reading…")
    out.reasoning("Let me see.")
    out.text("Paris.")
    out.end()
    assert "\x1b[2mLet me see.\x1b[0m\n\nParis." in "".join(written).replace("\r\x1b[K", "")


def test_a_stop_while_thinking_leaves_a_whole_line(written):
    out = TerminalWriter(lambda: True)
    out.begin(lambda: "reading…")
    out.reasoning("Let me see.")
    out.end()
    assert "".join(written).endswith("3 words (/thinking shows them)\x1b[0m\n")


def test_newest_words_fit_wide_characters():
    assert newest_words("one two three", 9) == "two three"
    assert newest_words("漢字 漢字漢字", 8) == "漢字漢字"
    assert newest_words("漢字漢字", 7) == ""


def test_thinking_is_shown_again(folder):
    with LLM(folder) as llm:
        session = Session(Conversation(llm, SamplingParams(temperature=0, max_tokens=4)))
        assert obey(session, "/thinking") == "The last answer has no reasoning."
        session.conversation.turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning": "\nwell\n"}]
        assert obey(session, "/thinking") == "well"
        assert session.folded
        assert "in full" in obey(session, "/thinking full")
        assert not session.folded
        with pytest.raises(MLXInferError, match="full or folded"):
            obey(session, "/thinking maybe")


def offered(text: str) -> list[str]:
    return [each.text for each in _CommandCompleter(COMMANDS).get_completions(Document(text), CompleteEvent())]


def test_what_follows_a_command_is_completed(own_home, tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules.md").touch()
    assert offered("/thi") == ["/thinking"]
    assert offered("/thinking f") == ["folded", "full"]
    assert offered("/set temp") == ["temperature"]
    assert offered("/system @ru") == ["les.md"]
    assert offered("see @ru") == ["les.md"]
    assert offered("/load ru") == ["les.md"]
    assert offered("/history ") == []
    with LLM(folder) as llm:
        conversation = Conversation(llm, SamplingParams(temperature=0, max_tokens=2))
        list(conversation.ask("abc"))
    Archive().keep(conversation.snapshot())
    assert offered("/history ") == ["1"]
    monkeypatch.setattr("mlxinfer.loading.find.resolve.Alias.installed", lambda self: True, raising=False)
    assert "smollm2" in offered("/model sm")


@pytest.mark.long
def test_messages_are_searched_with_ctrl_r(folder, own_home: Path):
    variables = os.environ | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    command = ["-m", "mlxinfer", "chat", str(folder), "--temperature", "0", "--max-tokens", "3"]
    child = pexpect.spawn(sys.executable, command, env=variables, encoding="utf-8", dimensions=(24, 80), timeout=60)
    child.expect("Ctrl-R searches")  # told the first time
    child.send("tell me of rivers\r")
    child.expect("stopped for length")
    child.send("hello\r")
    child.expect("stopped for length")
    child.send("\x12riv\r\x1b[200~ and lakes\x1b[201~")  # found, taken over, and added to at the place that was found
    child.send("\r")
    child.expect("stopped for length")
    child.send("/exit\r")
    child.expect(pexpect.EOF)
    child.close()
    lines = re.findall(r"^\+(.*)", (own_home / "mlxinfer" / "history").read_text(), re.MULTILINE)
    assert lines[:2] == ["tell me of rivers", "hello"]
    assert "rivers" in lines[2]
    assert "and lakes" in lines[2]
    again = pexpect.spawn(sys.executable, command, env=variables, encoding="utf-8", dimensions=(24, 80), timeout=60)
    again.expect("/help lists the commands")
    again.send("/exit\r")
    again.expect(pexpect.EOF)
    assert "Ctrl-R searches" not in again.before
    again.close()


def test_a_session_that_goes_on_reads_only_what_is_new(call, folder, own_home, tmp_path):
    options = ("--temperature", "0", "--max-tokens", "20", "--prefix-disk", "1", "--keep", "--kv", "8")
    long = "abc hello " * 30
    first = call("chat", str(folder), *options, stdin=f"{long}\nhello again\n/save {tmp_path}/talk.json\n")
    assert first.code == 0, first.err
    later = call("chat", "--continue", *options, stdin="and now\n/stats\n")
    assert later.code == 0, later.err
    found = re.search(r"read (\d+) tokens \((\d+) cached\)", later.err)
    assert found, later.err
    read, cached = map(int, found.groups())
    said = json.loads((tmp_path / "talk.json").read_text())["messages"]
    with LLM(folder) as llm:
        before = len(llm.tokenizer.encode_chat(said, add_generation_prompt=False))
    assert cached > 300
    # The last token of the last answer was never fed back, and a snapshot ends at most a few tokens of the template before it.
    assert before - 8 <= cached < read
