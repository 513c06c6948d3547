"""`mlxinfer run --image`: the picture reaches the model, and files that are none are named in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.models.seeing import GOLDEN, cases

from mlxinfer import LLM

Call = Callable[..., Any]
MODEL = str(GOLDEN / "smolvlm")
GREEDY = ("--temperature", "0", "--max-tokens", "8", "--ignore-eos", "--dtype", "float32")


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    Image.fromarray(cases()["one"].pictures[0]).save(tmp_path / "a cat.png")
    return tmp_path / "a cat.png"


@pytest.fixture(scope="module")
def answer() -> Callable[..., str]:
    with LLM(MODEL, dtype="float32") as llm:
        answers = {}
        for count in (0, 1, 2):
            images = cases()["two"].pictures[:count] if count == 2 else cases()["one"].pictures[:count]
            answers[count] = llm.chat("what is this?", images=images, temperature=0, max_tokens=8, ignore_eos=True).text
    return lambda count: f"{answers[count]}\n"


def test_the_picture_changes_the_answer(call: Call, picture: Path, answer: Callable[..., str]) -> None:
    result = call("run", MODEL, "what is this?", "--image", str(picture), *GREEDY)
    assert (result.code, result.out) == (0, answer(1))
    assert answer(1) != answer(0)
    assert "a cat.png: 97 x 135 pixels, 40 tokens" in result.err
    assert "image" not in call("run", MODEL, "what is this?", "--image", str(picture), "--quiet", *GREEDY).err


def test_pictures_keep_their_order(call: Call, tmp_path: Path, answer: Callable[..., str]) -> None:
    options = []
    for number, pixels in enumerate(cases()["two"].pictures):
        Image.fromarray(pixels).save(tmp_path / f"{number}.bmp")
        options += ["--image", str(tmp_path / f"{number}.bmp")]
    result = call("run", MODEL, "what is this?", *options, "--stats", *GREEDY)
    assert result.out == answer(2)
    assert "2 images of 56 tokens, encoded in" in result.err


def test_standard_input_may_be_the_picture(call: Call, picture: Path, answer: Callable[..., str]) -> None:
    result = call("run", MODEL, "what is this?", "--image", "-", *GREEDY, stdin=picture.read_bytes())
    assert (result.code, result.out) == (0, answer(1))
    assert "standard input: 97 x 135 pixels" in result.err
    assert call("run", MODEL, "--image", "-", *GREEDY, stdin=picture.read_bytes()).err.startswith("mlxinfer: the prompt is empty")


def test_the_object_has_the_images(call: Call, picture: Path) -> None:
    found = json.loads(call("run", MODEL, "what is this?", "--image", str(picture), "--json", *GREEDY).out)
    assert found["stats"]["images"] == 1
    assert found["stats"]["image_sizes"] == [[[97, 135], [192, 192]]]


def test_scaling_down_is_told(call: Call, tmp_path: Path) -> None:
    Image.new("RGB", (640, 480)).save(tmp_path / "wide.png")
    result = call("run", MODEL, "what is this?", "--image", str(tmp_path / "wide.png"), *GREEDY)
    assert "wide.png: 640 x 480 pixels, scaled down to 192 x 192, 40 tokens" in result.err
    less = call("run", MODEL, "what is this?", "--image", str(tmp_path / "wide.png"), "--max-pixels", "4096", *GREEDY)
    assert "scaled down to 64 x 64, 4 tokens" in less.err


def test_raw_prompts_have_placeholders(call: Call, picture: Path) -> None:
    assert call("run", MODEL, "<image>what", "--raw", "--image", str(picture), *GREEDY).code == 0
    result = call("run", MODEL, "what", "--raw", "--image", str(picture), *GREEDY)
    assert result.code == 2
    assert "the prompt has 0 image placeholders" in result.err


def test_urls_are_named_as_urls(call: Call) -> None:
    result = call("run", MODEL, "what", "--image", "https://example.com/cat.png", *GREEDY)
    assert result.code == 2
    assert "https://example.com/cat.png is a URL" in result.err


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("note: ")]


def test_files_that_are_no_pictures_are_named(call: Call, tmp_path: Path, picture: Path, chat_model: str) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "cut.png").write_bytes(picture.read_bytes()[:2000])
    out = BytesIO()
    Image.new("RGB", (4, 4)).save(out, "TIFF")
    (tmp_path / "scan.tiff").write_bytes(out.getvalue())
    for name, fault in (("notes.txt", "supported format"), ("scan.tiff", "TIFF is not supported"), ("none.png", "No such file")):
        result = call("run", MODEL, "what", "--image", str(tmp_path / name), *GREEDY)
        assert (result.code, result.out) == (2, "")
        (line,) = _lines(result.err)
        assert name in line
        assert fault in line
    result = call("run", MODEL, "what", "--image", str(picture), "--image", str(tmp_path / "cut.png"), *GREEDY)
    assert (result.code, _lines(result.err)[-1]) == (
        2,
        "mlxinfer: cut.png: the image cannot be decoded: it is truncated; save it again as PNG or JPEG",
    )


def test_models_that_cannot_see_say_why(call: Call, picture: Path, chat_model: str) -> None:
    result = call("run", chat_model, "what", "--image", str(picture))
    assert (result.code, _lines(result.err)) == (2, ["mlxinfer: a cat.png: the model cannot see images: it is a text model"])
    result = call("run", MODEL, "what", "--image", str(picture), "--no-vision")
    assert result.code == 2
    assert "loaded without its vision tower" in result.err


def test_a_continued_prompt_still_has_its_picture(call: Call, picture: Path) -> None:
    first = call("run", MODEL, "what is this?", "-f", str(picture), "--keep", *GREEDY).out[:-1]
    second = call("run", "-c", "what else?", *GREEDY, "--stats")
    turns = [
        {"role": "user", "content": "what is this?"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "what else?"},
    ]
    with LLM(MODEL, dtype="float32") as llm:
        pixels = cases()["one"].pictures[0]
        turns[0]["content"] = [{"type": "image", "image": pixels}, {"type": "text", "text": "what is this?"}]
        assert second.out == llm.chat(turns, temperature=0, max_tokens=8, ignore_eos=True).text + "\n"
    assert "1 image of 40 tokens" in second.err
    picture.unlink()
    assert "a cat.png cannot be read" in call("run", "-c", "and now?", "--no-keep", *GREEDY).err
