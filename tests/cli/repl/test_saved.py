"""Conversations in files: nothing that is there is lost, and nothing that was said."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from mlxinfer import SamplingParams
from mlxinfer.cli.repl import saved
from mlxinfer.cli.repl.saved import Archive, Saved, read, save
from mlxinfer.errors import MLXInferError

TURNS = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
TALK = Saved(TURNS, "be brief", SamplingParams(temperature=0.5, logit_bias={3: 1.0}), "tiny", "/models/tiny")
GREEDY = ("--temperature", "0", "--max-tokens", "4")


def test_what_is_saved_can_be_read(tmp_path: Path) -> None:
    save(tmp_path / "talk.json", TALK)
    assert read(tmp_path / "talk.json") == TALK
    assert stat.S_IMODE((tmp_path / "talk.json").stat().st_mode) == 0o600


@pytest.mark.parametrize("content", ["my notes\n", "", '{"name": "package.json"}', "[]"])
@pytest.mark.parametrize("replace", [False, True])
def test_what_is_no_conversation_is_never_replaced(tmp_path: Path, content: str, replace: bool) -> None:
    path = tmp_path / "notes.md"
    path.write_text(content)
    with pytest.raises(MLXInferError, match="is not a saved conversation"):
        save(path, TALK, replace=replace)
    assert path.read_text() == content
    assert list(tmp_path.iterdir()) == [path]


def test_a_conversation_is_replaced_only_when_asked(tmp_path: Path) -> None:
    path, longer = tmp_path / "talk.json", Saved([*TURNS, *TURNS])
    save(path, TALK)
    with pytest.raises(MLXInferError, match="holds 2 messages already: /save! replaces them"):
        save(path, longer)
    save(path, longer, replace=True)
    assert read(path).turns == longer.turns


def test_an_empty_conversation_replaces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    save(path, TALK)
    with pytest.raises(MLXInferError, match="Nothing to save"):
        save(path, Saved([]), replace=True)
    assert read(path) == TALK


def test_links_and_permissions_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "talk.json", tmp_path / "link.json"
    save(path, TALK)
    path.chmod(0o644)
    link.symlink_to(path)
    save(link, Saved([*TURNS, *TURNS]), replace=True)
    assert link.is_symlink()
    assert len(read(path).turns) == 4
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "no valid JSON in line 1"),
        ("{}", '"messages"'),
        ('{"messages": [{"role": "user"}]}', 'message 1 has no text as its "content"'),
        ('{"messages": [{"role": "user", "content": [{}]}]}', 'message 1 has no text as its "content"'),
        ('{"messages": [], "params": {"heat": 1}}', "heat"),
        ('{"messages": [], "params": {"top_p": 7}}', "top_p must be"),
        ('{"messages": [], "params": 5}', '"params" must be an object'),
        ("[" * 100_000, "is not a saved conversation"),
    ],
)
def test_a_damaged_file_says_what_is_missing(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "talk.json"
    path.write_text(content)
    with pytest.raises(MLXInferError) as caught:
        read(path)
    assert told in str(caught.value)


def test_a_list_of_messages_from_elsewhere_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_text(json.dumps({"messages": [{"role": "system", "content": "be brief"}, *TURNS]}))
    assert read(path) == Saved(TURNS, "be brief")


def test_the_archive_keeps_one_private_file_for_each_conversation(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "kept")
    archive.keep(Saved([]))
    assert archive.files() == []
    archive.keep(TALK)
    archive.keep(Saved([*TURNS, *TURNS]))
    (path,) = archive.files()
    assert len(read(path).turns) == 4
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    archive.renew()
    archive.keep(TALK)
    assert len(archive.files()) == 2
    assert read(archive.latest()) == TALK
    assert "tiny, 2 messages: hello" in archive.lines()[0]


def test_the_archive_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "MOST_KEPT", 3)
    archive = Archive(tmp_path)
    for i in range(5):
        archive.renew()
        archive.keep(Saved([{"role": "user", "content": str(i)}]))
        os.utime(archive.latest(), (i, i))
    assert [read(path).turns[0]["content"] for path in archive.files()] == ["4", "3", "2"]


def test_two_chats_that_continue_one_conversation_lose_nothing(tmp_path: Path) -> None:
    first, second = Archive(tmp_path), Archive(tmp_path)
    first.keep(TALK)
    second.follow(first.latest())
    first.keep(Saved([*TURNS, {"role": "user", "content": "first"}]))
    second.keep(Saved([*TURNS, {"role": "user", "content": "second"}]))
    assert {read(path).turns[-1]["content"] for path in first.files()} == {"first", "second"}


def test_continue_goes_on_with_the_last_conversation_and_its_model(call, chat_model, own_home: Path) -> None:
    assert call("chat", "--continue").code == 2
    first = call("chat", chat_model, "--keep", "--system", "be brief", *GREEDY, stdin="hello\n")
    second = call("chat", "--continue", *GREEDY, stdin="again\n")
    assert (first.code, second.code) == (0, 0)
    (path,) = (own_home / "mlxinfer" / "conversations").iterdir()
    content = json.loads(path.read_text())
    assert [turn["content"] for turn in content["messages"]] == ["hello", first.out[:-1], "again", second.out[:-1]]
    assert content["system"] == "be brief"
    assert "4 messages: hello" in call("chat", "--list").out


def test_a_pipe_keeps_nothing_unless_asked(call, chat_model, own_home: Path) -> None:
    call("chat", chat_model, *GREEDY, stdin="hello\n")
    assert not (own_home / "mlxinfer" / "conversations").exists()
    assert "No conversation has been kept" in call("chat", "--list").out


def test_conversations_are_found_by_all_words_of_a_text(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    archive.keep(TALK)
    archive.renew()
    archive.keep(Saved([{"role": "user", "content": "Bonjour le monde"}], title="French"))
    os.utime(archive.files()[1], (1, 1))
    assert [line[:3] for line in archive.lines(text="MONDE bon")] == ["  1"]
    assert [line[:3] for line in archive.lines(text="hello")] == ["  2"], "with the number that /history takes"
    assert archive.lines(text="french")[0].endswith(", 1 message: French")
    assert archive.lines(text="hello monde") == ["No kept conversation has 'hello monde'."]


def test_a_conversation_is_deleted_unless_it_is_the_present_one(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    archive.keep(TALK)
    first = archive.latest()
    with pytest.raises(MLXInferError, match="This is the present conversation"):
        archive.delete(first)
    archive.renew()
    archive.delete(first)
    assert archive.files() == []
    with pytest.raises(MLXInferError, match="cannot delete"):
        archive.delete(first)


def test_markdown_has_all_messages_and_replaces_nothing(tmp_path: Path) -> None:
    image = {"path": str(tmp_path / "a b.png"), "sha256": "0"}
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": "hello", "images": [image]},
        {"role": "assistant", "content": "", "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "assistant", "content": "# hi\n"},
    ]
    talk = Saved(turns, "be brief", model="tiny")
    path = tmp_path / "talk.md"
    saved.export(path, talk)
    found = path.read_text()
    assert found.startswith("# hello\n\n## System\n\nbe brief\n\n## You\n\n![](file://")
    assert "a%20b.png" in found
    assert "<details><summary>Reasoning</summary>\n\nhm\n\n</details>\n\n```json\n" in found
    assert found.endswith("## add\n\n3\n\n## tiny\n\n# hi\n")
    with pytest.raises(MLXInferError, match="exists: choose another name"):
        saved.export(path, talk)
    with pytest.raises(MLXInferError, match="Nothing to export"):
        saved.export(tmp_path / "other.md", Saved([]))


def test_a_title_is_kept_and_listed(call, chat_model, tmp_path: Path) -> None:
    export = tmp_path / "talk.md"
    lines = f"/title My talk\nhello\n/export {export}\n/title\n/delete 1\n/history talk\n"
    result = call("chat", chat_model, "--keep", *GREEDY, stdin=lines)
    assert "title: My talk" in result.err
    assert "/delete asks first, so it needs a terminal" in result.err
    assert "2 messages: My talk" in result.err
    assert export.read_text().startswith("# My talk\n")
    call("chat", "-c", *GREEDY, stdin="again\n")
    assert "4 messages: My talk" in call("chat", "--search", "talk hello").out
    assert call("chat", "--search", "nothing of this").out == "No kept conversation has 'nothing of this'.\n"
