"""Questions about pictures: the file, the comparison of answers, and a model that answers them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mlxinfer.errors import EvaluationError, ImageError, TextError
from mlxinfer.evaluation.images import _compared, evaluate_images, plain, read_questions

GOLDEN = Path(__file__).parents[1] / "golden" / "vision" / "smolvlm"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rng = np.random.default_rng(5)
    for name in ("a", "b"):
        Image.fromarray(rng.integers(0, 256, (40, 60, 3), np.uint8)).save(tmp_path / f"{name}.png")
    records = [
        {"image": "a.png", "question": "describe the image", "answer": "nothing"},
        {"image": ["a.png", "b.png"], "question": "what is in the second picture?", "answer": ["one", "two"]},
        {"image": "b.png", "question": "describe the image", "answer": "nothing"},
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, records)) + "\n")
    return path


def test_questions_of_a_file(file: Path) -> None:
    found = read_questions(file)
    assert [len(each.images) for each in found] == [1, 2, 1]
    assert found[1].answers == ("one", "two")
    assert all(path.is_absolute() for each in found for path in each.images)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("{", "line 4 of .* is not JSON"),
        ("[1]", "line 4 of .* is not an object"),
        ('{"image": "a.png", "question": "x"}', "line 4 of .*: answer must be text"),
        ('{"image": [], "question": "x", "answer": "y"}', "line 4 of .*: image must be text"),
        ('{"image": "c.png", "question": "x", "answer": "y"}', "line 4 of .*c.png does not exist"),
    ],
)
def test_what_is_wrong_is_named_by_its_line(line: str, error: str, file: Path) -> None:
    file.write_text(file.read_text() + line)
    with pytest.raises(TextError, match=error):
        read_questions(file)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("\n")
    with pytest.raises(TextError, match="has no questions"):
        read_questions(tmp_path / "x.jsonl")


@pytest.mark.parametrize(
    ("answer", "exact", "contained", "anls"),
    [
        ("One.", True, True, 1.0),
        ("the two", True, True, 1.0),
        ("It is two, I think.", False, True, 0.0),
        ("twos", False, False, 0.75),
        ("thousands", False, False, 0.0),
        ("", False, False, 0.0),
    ],
)
def test_answers_are_compared(answer: str, exact: bool, contained: bool, anls: float, file: Path) -> None:
    found = _compared(read_questions(file)[1], answer, 0)
    assert (found.exact, found.contained, found.anls) == (exact, contained, pytest.approx(anls))


def test_numbers_keep_their_points() -> None:
    assert plain("The total is 12.40 €.") == "total is 12.40 €"


def test_a_model_is_asked(file: Path) -> None:
    questions, counts = read_questions(file), []
    found = evaluate_images(GOLDEN, questions, max_tokens=4, settings={"dtype": "float32"}, done=counts.append)
    assert counts == [3]
    assert found.answered[0].answer != found.answered[2].answer
    assert found.answered[1].image_tokens == 2 * found.answered[0].image_tokens > 0
    assert found.exact.mean == 0.0


def test_a_damaged_picture_is_named_by_its_file(file: Path) -> None:
    damaged = file.parent / "b.png"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with pytest.raises(ImageError, match=rf"^{re.escape(str(damaged))}: the image cannot be decoded"):
        evaluate_images(GOLDEN, read_questions(file), max_tokens=4, settings={"dtype": "float32"})


def test_a_model_without_a_tower_is_refused(file: Path) -> None:
    with pytest.raises(EvaluationError, match="cannot see images"):
        evaluate_images(GOLDEN, read_questions(file), settings={"vision": "off"})
