"""Pictures in a chat: commands, dropped files, retries, saved conversations, and files that are gone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.models.seeing import GOLDEN, cases

from mlxinfer import LLM, SamplingParams
from mlxinfer.cli.repl.commands import ATTACHED, Session, obey
from mlxinfer.cli.repl.conversation import Conversation
from mlxinfer.cli.repl.pictures import dropped, first_path
from mlxinfer.cli.repl.saved import read, save
from mlxinfer.errors import ImageError, MLXInferError

MODEL = str(GOLDEN / "smolvlm")
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
OPTIONS = ("--temperature", "0", "--max-tokens", "8", "--ignore-eos", "--dtype", "float32")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, dtype="float32") as found:
        yield found


@pytest.fixture
def conversation(llm: LLM) -> Conversation:
    return Conversation(llm, PARAMS, source=MODEL)


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    found = [tmp_path / "a cat.png", tmp_path / "dog.bmp"]
    for path, pixels in zip(found, cases()["two"].pictures, strict=True):
        Image.fromarray(pixels).save(path)
    return found


def _said(chunks: Any) -> str:
    return "".join(chunk.text for chunk in chunks)


def _expected(llm: LLM, *messages: tuple[str, list[Path]]) -> str:
    turns: list[dict[str, Any]] = []
    for text, images in messages:
        content = [*({"type": "image", "image": path} for path in images), {"type": "text", "text": text}]
        turns.append({"role": "user", "content": content})
        answer = llm.chat(turns, PARAMS).text
        turns.append({"role": "assistant", "content": answer})
    return answer


def test_a_picture_goes_with_the_text_or_the_next_message(llm: LLM, conversation: Conversation, pictures: list[Path], capsys: Any) -> None:
    session = Session(conversation)
    assert _said(obey(session, f'/image "{pictures[0]}" what is this?')) == _expected(llm, ("what is this?", pictures[:1]))
    assert "a cat.png: 75 x 201 pixels, scaled down" not in capsys.readouterr().err
    assert obey(session, f"/image {pictures[1]}") == ATTACHED
    assert "dog.bmp: 129 x 67 pixels" in capsys.readouterr().err
    found = _said(conversation.ask("and this?"))
    assert found == _expected(llm, ("what is this?", pictures[:1]), ("and this?", pictures[1:]))
    assert conversation.pending == []
    assert [len(turn.get("images", ())) for turn in conversation.turns] == [1, 0, 1, 0]
    names = [name for name, _ in conversation.token_counts()]
    assert names[0] == "picture: a cat.png"
    assert conversation.token_counts()[0][1] == llm.image_layout(pictures[0]).tokens


def test_paths_with_spaces_need_no_quotes(conversation: Conversation, pictures: list[Path]) -> None:
    assert obey(Session(conversation), f"/image {pictures[0]}") == ATTACHED
    assert conversation.pending[0]["path"] == str(pictures[0])


def test_pictures_stay_with_a_message_that_is_undone_or_retried(llm: LLM, conversation: Conversation, pictures: list[Path]) -> None:
    conversation.attach(pictures[0])
    first = _said(conversation.ask("what is this?"))
    assert _said(conversation.retry()) == first
    assert len(conversation.turns[0]["images"]) == 1
    assert conversation.undo() == "what is this?"
    assert (conversation.turns, len(conversation.pending)) == ([], 1)
    assert _said(conversation.ask(conversation.draft)) == first
    conversation.attach(pictures[1])
    assert _said(conversation.retry()) == first
    assert [Path(entry["path"]).name for entry in conversation.pending] == ["dog.bmp"]
    conversation.reset()
    assert _said(conversation.ask("what is this?")) == _expected(llm, ("what is this?", pictures[1:]))


def test_an_answer_goes_on_after_its_pictures(llm: LLM, conversation: Conversation, pictures: list[Path]) -> None:
    conversation.attach(pictures[0])
    conversation.set("max_tokens", 3)
    begun = _said(conversation.ask("what is this?"))
    conversation.set("max_tokens", 5)
    _said(conversation.resume())
    content = [{"type": "image", "image": pictures[0]}, {"type": "text", "text": "what is this?"}]
    whole = llm.chat([{"role": "user", "content": content}], PARAMS)
    assert conversation.turns[-1]["content"].startswith(begun)
    assert conversation.context_used == whole.usage.prompt_tokens + 8


def test_what_cannot_be_attached_is_named(conversation: Conversation, tmp_path: Path, chat_model: str) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for argument, fault in (
        (f"{tmp_path}/none.png", "none.png cannot be read"),
        (f"{tmp_path}/notes.txt", "notes.txt: this is not an image"),
    ):
        with pytest.raises(ImageError, match=fault):
            obey(Session(conversation), f"/image {argument}")
    with pytest.raises(MLXInferError, match="/image takes a picture file"):
        obey(Session(conversation), "/image")
    assert conversation.pending == []
    Image.new("RGB", (4, 4)).save(tmp_path / "x.png")
    with LLM(chat_model) as blind:
        with pytest.raises(ImageError, match=r"x\.png: the model cannot see images: it is a text model"):
            Conversation(blind, PARAMS).attach(tmp_path / "x.png")
        conversation.attach(tmp_path / "x.png")
        _said(conversation.ask("what is this?"))
        with pytest.raises(ImageError, match="the model cannot see images"):
            conversation.use(lambda _: blind, "blind")
    assert conversation.name != "blind"


def test_a_saved_conversation_has_the_paths_of_its_pictures(
    llm: LLM, conversation: Conversation, pictures: list[Path], tmp_path: Path
) -> None:
    for path in pictures:
        conversation.attach(path)
    _said(conversation.ask("what is this?"))
    save(tmp_path / "talk.json", conversation.snapshot())
    entries = json.loads((tmp_path / "talk.json").read_text())["messages"][0]["images"]
    assert [entry["path"] for entry in entries] == list(map(str, pictures))

    again = Conversation(llm, PARAMS)
    assert again.restore(read(tmp_path / "talk.json")) == []
    assert again.context_used >= conversation.context_used - 8
    assert _said(again.ask("and now?")) == _said(conversation.ask("and now?"))

    pictures[0].unlink()
    Image.new("RGB", (8, 8)).save(pictures[1])
    later = Session(Conversation(llm, PARAMS))
    told = obey(later, f"/load {tmp_path / 'talk.json'}").told
    assert told.splitlines()[0] == f"2 messages from {tmp_path / 'talk.json'}"
    assert "a cat.png cannot be read: No such file or directory: the model no longer sees it" in told
    assert "dog.bmp has changed: the model no longer sees it" in told
    (message,) = (each for each in later.conversation.messages if each["role"] == "user")
    assert [part["type"] for part in message["content"]] == ["text"] * 3
    assert message["content"][0]["text"] == "[the picture a cat.png is no longer available]\n"
    _said(later.conversation.ask("and now?"))


def test_the_oldest_pictures_make_room(llm: LLM, pictures: list[Path]) -> None:
    conversation = Conversation(llm, PARAMS)
    for _ in range(3):
        conversation.attach(pictures[0])
        _said(conversation.ask("what is this?"))
    used = conversation.context_used
    conversation.attach(pictures[1])
    assert conversation.trim(1) == 1
    assert conversation.context_used < used - llm.image_layout(pictures[0]).tokens
    assert len(conversation.pending) == 1


@pytest.mark.parametrize(
    ("text", "path", "rest"),
    [
        ("/a/b.png what", "/a/b.png", " what"),
        (r"/a/b\ c\(1\).png", "/a/b c(1).png", ""),
        ("'/a/b c.png' what is 'this'", "/a/b c.png", " what is 'this'"),
        ('"/a/b c.png"', "/a/b c.png", ""),
        ("file:///a/b%20c.png what", "/a/b c.png", " what"),
        ("/a/\u202f5.00\u202fPM.png", "/a/\u202f5.00\u202fPM.png", ""),
    ],
)
def test_paths_are_written_as_in_a_shell(text: str, path: str, rest: str) -> None:
    assert first_path(text) == (Path(path), rest)


def test_dropped_pictures(pictures: list[Path]) -> None:
    cat, dog = pictures
    escaped = str(cat).replace(" ", "\\ ")
    assert dropped(f"{escaped} {dog} compare them") == ([cat, dog], "compare them")
    assert dropped(f"{escaped} ") == ([cat], "")
    assert dropped(str(cat)) == ([cat], "")
    assert dropped(f"'{cat}'\nwhat is this?") == ([cat], "what is this?")
    assert dropped(f"what is this?\n{cat.as_uri()}") == ([cat], "what is this?")
    for text in (f"what is {dog} about?", f"line\n{dog} about?", "cat.png is a name", f"{dog}x what", "/nowhere/x.png what", "", "it's"):
        assert dropped(text) == ([], text)
    for text in ("~5 or so", "~nobody/x.png what"):
        assert dropped(text) == ([], text)


def test_a_piped_chat_takes_pictures(call: Callable[..., Any], llm: LLM, pictures: list[Path]) -> None:
    cat, dog = pictures
    result = call("chat", MODEL, *OPTIONS, stdin=f"{dog} what is this?\n/image '{cat}'\nand this?\n")
    expected = _expected(llm, ("what is this?", [dog]), ("and this?", [cat]))
    assert result.code == 0
    assert result.out.endswith(f"{expected}\n")
    assert ATTACHED in result.err
    named = call("run", MODEL, f"what is @{dog}?", *OPTIONS)
    assert "dog.bmp: 129 x 67 pixels" in named.err
    failed = call("chat", MODEL, *OPTIONS, stdin="/image /nowhere.png hello\n")
    assert (failed.code, failed.out) == (2, "")
