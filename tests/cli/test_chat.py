"""The chat over a pipe, and its parts, with a real (tiny) model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.tiny_directory import tiny_directory

from mlxinfer import LLM, SamplingParams
from mlxinfer.cli.repl import loop
from mlxinfer.cli.repl.conversation import Conversation
from mlxinfer.cli.repl.loop import COMMANDS, Leave, Session
from mlxinfer.cli.repl.terminal import meter
from mlxinfer.errors import MLXInferError, PromptError, SamplingError

PARAMS = SamplingParams(temperature=0, max_tokens=8)
GREEDY = ("--temperature", "0", "--max-tokens", "8")


@pytest.fixture(scope="module")
def llm(chat_model):
    with LLM(chat_model) as llm:
        yield llm


@pytest.fixture
def conversation(llm):
    return Conversation(llm, PARAMS)


def obey(conversation: Conversation, line: str) -> str:
    return loop.obey(Session(conversation), line)


def say(conversation: Conversation, text: str) -> str:
    return "".join(chunk.text for chunk in conversation.ask(text))


def test_an_answer_sees_what_was_said_before(llm, conversation):
    first = say(conversation, "hello")
    second = say(conversation, "go on")
    turns = [("user", "hello"), ("assistant", first), ("user", "go on")]
    assert second == llm.chat([{"role": role, "content": content} for role, content in turns], PARAMS).text
    assert [turn["content"] for turn in conversation.turns] == ["hello", first, "go on", second]
    assert conversation.context_used == conversation.usage.total_tokens


def test_a_stopped_answer_stays_in_the_conversation(conversation):
    chunks = conversation.ask("hello")
    text = next(chunks).text + next(chunks).text
    chunks.close()
    assert conversation.turns[-1] == {"role": "assistant", "content": text}
    assert (conversation.finish_reason, conversation.usage) == ("cancelled", None)
    assert say(conversation, "again")


def test_a_question_that_does_not_fit_leaves_no_trace(conversation):
    say(conversation, "hello")
    before = (list(conversation.turns), conversation.context_used)
    with pytest.raises(PromptError, match="/reset"):
        say(conversation, "x" * conversation.context_size)
    assert (conversation.turns, conversation.context_used) == before


def test_meter_grows(conversation):
    assert meter(conversation, 4) == "░░░░ 0 / 256 tokens (0%)"
    conversation.context_used = 128
    assert meter(conversation, 4) == "██░░ 128 / 256 tokens (50%)"


def test_without_a_template_there_is_no_chat(call, tmp_path):
    result = call("chat", str(tiny_directory(tmp_path / "base", chat=False)))
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "mlxinfer run" in result.err


def test_every_command_is_in_the_help(conversation):
    text = obey(conversation, "/help")
    assert all(name in text for name in COMMANDS)
    assert set(COMMANDS) == {
        *("/help", "/reset", "/undo", "/continue", "/trim", "/system", "/save", "/load", "/history", "/set", "/stats", "/exit")
    }


def test_reset_and_system(llm, conversation):
    obey(conversation, "/system be brief")
    say(conversation, "hello")
    obey(conversation, "/reset")
    assert conversation.messages == [{"role": "system", "content": "be brief"}]
    assert say(conversation, "hello") == llm.chat([*conversation.messages[:1], {"role": "user", "content": "hello"}], PARAMS).text
    assert obey(conversation, "/system none") == "system: none"
    assert conversation.system is None


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("/set temperature 0.5", "temperature", 0.5),
        ("/set top_k=7", "top_k", 7),
        ("/set stop ###", "stop", ("###",)),
        ('/set stop ["a b", "c"]', "stop", ("a b", "c")),
        ("/set seed none", "seed", None),
        ('/set logit_bias {"5": -3}', "logit_bias", {5: -3.0}),
        ("/set ignore_eos true", "ignore_eos", True),
    ],
)
def test_set(conversation, line, name, value):
    assert obey(conversation, line).startswith(name)
    assert getattr(conversation.params, name) == value


@pytest.mark.parametrize("line", ["/set stats loud", "/set temperature hot", "/set top_p 0", "/set warmth 1", "/set n 2", "/set stop 5"])
def test_nonsense_settings_change_nothing(conversation, line):
    with pytest.raises(MLXInferError):
        obey(conversation, line)
    assert conversation.params == PARAMS


def test_set_alone_shows_everything_that_can_be_set(conversation):
    shown = obey(conversation, "/set")
    assert "temperature          0" in shown
    assert "logprobs" not in shown


def test_save_and_load(llm, conversation, tmp_path):
    path = tmp_path / "talk.json"
    obey(conversation, "/system be brief")
    obey(conversation, '/set logit_bias {"5": 1}')
    say(conversation, "hello")
    obey(conversation, f"/save {path}")
    other = Conversation(llm, SamplingParams())
    assert obey(other, f"/load {path}").startswith(f"2 messages from {path}\n> hello\n")
    assert (other.messages, other.params) == (conversation.messages, conversation.params)
    end_of_turn = 1
    assert other.context_used == conversation.context_used + end_of_turn
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"messages": [1], "system": null, "params": {}}',
        b'{"messages": [], "system": null, "params": {"heat": 1}}',
        b'{"messages": [], "system": null, "params": {"top_p": 7}}',
        b'{"messages": [], "system": 5, "params": {}}',
        b'{"messages": [], "system": null, "params": {"logit_bias": {"x": 1}}}',
    ],
)
def test_loading_a_wrong_file_changes_nothing(conversation, tmp_path, content):
    say(conversation, "hello")
    before = (conversation.messages, conversation.params, conversation.context_used)
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(MLXInferError):
        obey(conversation, f"/load {path}")
    assert (conversation.messages, conversation.params, conversation.context_used) == before


def test_saving_where_it_cannot_be_is_an_error(conversation, tmp_path):
    for line in ("/save", f"/save {tmp_path}/none/file", f"/save {tmp_path}"):
        with pytest.raises(MLXInferError):
            obey(conversation, line)
    assert list(tmp_path.iterdir()) == []


def test_exit_and_unknown_commands(conversation):
    with pytest.raises(Leave):
        obey(conversation, "/exit")
    with pytest.raises(MLXInferError, match="/help"):
        obey(conversation, "/fly")
    with pytest.raises(SamplingError):
        conversation.set("n", 2)


def test_piped_lines_are_messages(call, chat_model, llm, conversation):
    answers = [say(conversation, text) for text in ("hello", "two\nlines")]
    result = call("chat", chat_model, *GREEDY, stdin='hello\n\n"""two\nlines"""\n/exit\nnever read\n')
    assert (result.code, result.out) == (0, "".join(answer + "\n" for answer in answers))


def test_piped_commands_and_errors_stay_off_standard_output(call, chat_model, tmp_path: Path):
    path = tmp_path / "talk.json"
    lines = ["/fly", "x" * 300, "/set temperature hot", "hello", f"/save {path}", "/stats"]
    result = call("chat", chat_model, "--system", "be brief", *GREEDY, stdin="\n".join(lines))
    saved = json.loads(path.read_text())
    assert result.code == 2
    assert result.out == saved["messages"][1]["content"] + "\n"
    assert saved["system"] == "be brief"
    for told in ("there is no /fly", "/reset begins anew", "/trim drops", "temperature must be", "saved to", "tok/s"):
        assert told in result.err
