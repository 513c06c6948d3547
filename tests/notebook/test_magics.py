"""`%load_ext mlxinfer` in a real kernel: one conversation, options, errors without a traceback."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from PIL import Image
from support.models.seeing import GOLDEN
from support.models.tiny_directory import tiny_directory
from support.processes.notebook_kernel import Cell, notebook_kernel
from support.processes.optional import needs

from mlxinfer.notebook.magics import _divided

needs("ipykernel")


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    model = str(tiny_directory(tmp_path_factory.mktemp("models") / "long", eos=False, context=100_000))
    with notebook_kernel() as cell:
        cell.run(f"%load_ext mlxinfer\nmodel = {model!r}")
        yield cell


def test_cells_are_one_conversation(cell):
    cell.run("%%chat --model $model --max-tokens 8 --temperature 0\nhello")
    assert cell.last_display["text/markdown"].startswith(cell.last_display["text/plain"])
    cell.run("%%chat -n 4\nand then?")
    assert cell.run("print([m['role'] for m in conversation.messages])") == "['user', 'assistant', 'user', 'assistant']"
    cell.run("%%chat --system 'Be brief.' -n 4\nhello")
    assert cell.run("print(conversation.messages[0], len(conversation.messages))") == "{'role': 'system', 'content': 'Be brief.'} 3"
    cell.run("%%chat --new -n 4\nhello")
    assert cell.run("print(len(conversation.messages))") == "2"


def test_an_interrupted_answer_stays_in_the_conversation(cell):
    cell.run("%%chat --new --temperature 0 -n 90000\nhello", interrupt_after=20)
    count = int(cell.run("print(len(conversation.messages[-1]['content']))"))
    assert 20 <= count < 90_000
    assert "stopped" in cell.last_display["text/markdown"]


@pytest.mark.parametrize(
    ("line", "options", "text"),
    [
        ('What\'s the "time"?', [], 'What\'s the "time"?'),
        ("--temperature 0.7 --max-tokens 5 Say hi -n", ["--temperature", "0.7", "--max-tokens", "5"], "Say hi -n"),
        ("--model=nope -n 4 It's  late", ["--model=nope", "-n", "4"], "It's  late"),
        ("--new --system 'Be brief.' hello", ["--new", "--system", "Be brief."], "hello"),
        ("-- --new is an option", [], "--new is an option"),
        ("-5 + 3 = ?", [], "-5 + 3 = ?"),
        ("- a list", [], "- a list"),
        ("--new", ["--new"], ""),
        ("", [], ""),
    ],
)
def test_options_of_a_line_come_first(line, options, text):
    assert _divided(line) == (options, text)


def test_a_line_takes_options_as_a_cell_does(cell):
    assert cell.run("%chat --model $model --new --temperature 0 -n 3 How are you?") == ""
    assert cell.run("%chat --new --temperature 0 -n 3 What's up?") == ""
    assert cell.run("print([m['content'] for m in conversation.messages[:1]], len(conversation.messages))") == '["What\'s up?"] 2'
    assert "3 tokens" in cell.last_display["text/markdown"]


def test_nothing_to_send_is_told(cell):
    assert cell.run("%chat").startswith("mlxinfer: %chat: nothing to send: write the message after it")
    assert cell.run("%chat --new") == ""
    assert cell.run("print(conversation.messages)") == "[]"


def test_mistakes_are_one_line(cell):
    for asked in ("%chat --modle x hello", "%%chat --modle x\nhello", "%chat --system 'open", "%chat -n many hello"):
        told = cell.run(asked)
        assert told.count("%chat:") == 1, told
    for line, message in (
        ("--modle x", "unrecognized arguments"),
        ("-n many", "invalid int value"),
        ("--model nowhere/at-all", "nowhere/at-all"),
    ):
        (told,) = [text for text in cell.run(f"%%chat {line}\nhello").split("\n") if text.startswith("mlxinfer: ")]
        assert message in told


@pytest.mark.long
def test_a_question_in_a_line_and_what_objects_look_like(cell):
    cell.run("conversation.messages.clear()")
    cell.run("%chat hello", interrupt_after=10)
    assert cell.run("print(conversation.messages[0])") == "{'role': 'user', 'content': 'hello'}"
    cell.run("from IPython.display import display; display(conversation.llm, display_id=True)")
    assert "architecture" in cell.last_display["text/html"]


def test_a_picture_stays_in_the_conversation(tmp_path):
    Image.new("RGB", (40, 30), "red").save(tmp_path / "a cat.png")
    with notebook_kernel() as cell:
        cell.run(f"%load_ext mlxinfer\nmodel = {str(GOLDEN / 'smolvlm')!r}")
        cell.run(f"%%chat --model $model --image '{tmp_path / 'a cat.png'}' -n 4\nwhat is this?")
        cell.run("%chat -n 4 and then?")
        assert cell.run("print([part['type'] for part in conversation.messages[0]['content']], len(conversation.messages))") == (
            "['image', 'text'] 4"
        )
        told = cell.run("%chat --image /nowhere.png what?")
        assert told.startswith("mlxinfer: messages[4].content[0]: the image /nowhere.png cannot be read")
