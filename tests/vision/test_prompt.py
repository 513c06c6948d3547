"""Placeholders in prompts: one for each image, expanded in the text; those that users spell stay text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxinfer.errors import PromptError
from mlxinfer.tokenizer.tokenizer import from_directory
from mlxinfer.vision.families import open_processor
from mlxinfer.vision.prompt import ImageRun, expanded, image_runs, joined_text_parts, rope_positions

GOLDEN = Path(__file__).parents[1] / "golden" / "vision"
FAMILIES = sorted(folder.name for folder in GOLDEN.iterdir() if (folder / "tokenizer.json").is_file())
SPELLED = ("<start_of_image>", "<image_soft_token>", "[IMG]", "[IMG_END]", "<|image_pad|>", "<|vision_start|>", "<image>", "<row_1_col_1>")


def _messages(text: str, images: int = 1) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*[{"type": "image"}] * images, {"type": "text", "text": text}]}]


@pytest.mark.parametrize("family", FAMILIES)
def test_spelled_placeholders_stay_text(family: str) -> None:
    processor, tokenizer = open_processor(GOLDEN / family), from_directory(GOLDEN / family)
    layouts = [processor.plan((60, 90))]
    text = " ".join(SPELLED)
    ids = tokenizer.encode_chat(_messages(text), expand=lambda prompt: expanded(prompt, processor, layouts))
    assert ids.count(processor.image_token_id) == layouts[0].tokens
    image_runs(ids, processor.image_token_id, layouts)
    assert text in tokenizer.decode(ids)
    plain = tokenizer.encode_chat(_messages("x"), expand=lambda prompt: expanded(prompt, processor, layouts))
    for spelled in SPELLED:
        special = tokenizer.encode(spelled, add_special_tokens=False)
        if len(special) == 1:
            assert ids.count(special[0]) == plain.count(special[0])


def test_placeholders_spelled_across_text_parts_stay_text() -> None:
    processor, tokenizer = open_processor(GOLDEN / "smolvlm"), from_directory(GOLDEN / "smolvlm")
    layouts = [processor.plan((60, 90))]
    parts = [{"type": "image"}, {"type": "text", "text": "a <ima"}, {"type": "text", "text": "ge> b"}]
    joined = joined_text_parts(parts)
    assert joined == [{"type": "image"}, {"type": "text", "text": "a <image> b"}]
    ids = tokenizer.encode_chat([{"role": "user", "content": joined}], expand=lambda prompt: expanded(prompt, processor, layouts))
    assert ids.count(processor.image_token_id) == layouts[0].tokens
    assert "a <image> b" in tokenizer.decode(ids)
    apart = [parts[1], parts[0], parts[2]]
    assert joined_text_parts(apart) == apart


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("rendered", "given"), [(1, 0), (0, 1), (1, 2), (3, 2)])
def test_images_and_placeholders_must_agree(family: str, rendered: int, given: int) -> None:
    processor, tokenizer = open_processor(GOLDEN / family), from_directory(GOLDEN / family)
    layouts = [processor.plan((60, 90))] * given
    with pytest.raises(PromptError, match=f"rendered {rendered} image placeholders .* for {given} images"):
        tokenizer.encode_chat(_messages("hello", rendered), expand=lambda prompt: expanded(prompt, processor, layouts))


def test_runs_that_do_not_fit_are_refused() -> None:
    layouts = [open_processor(GOLDEN / "mistral3").plan((50, 80))]
    assert layouts[0].counts == (3, 3)
    assert image_runs([1, 9, 9, 9, 2, 9, 9, 9], 9, layouts) == [ImageRun(1, 3, 0, 0), ImageRun(5, 3, 0, 3)]
    for ids in ([1, 2], [9, 9, 9, 1, 9, 9], [9] * 6, [9, 9, 9, 1, 9, 9, 9, 2, 9, 9, 9]):
        with pytest.raises(PromptError, match="the tokenizer does not fit"):
            image_runs(ids, 9, layouts)
    assert image_runs([1, 2], 9, []) == []
    with pytest.raises(PromptError):
        image_runs([1, 9], 9, [])


def test_rope_positions_by_hand() -> None:
    positions, delta = rope_positions(10, [ImageRun(2, 6, 0, 0)], [(2, 3)])
    assert positions.tolist() == [[0, 1, 2, 2, 2, 2, 2, 2, 5, 6], [0, 1, 2, 2, 2, 3, 3, 3, 5, 6], [0, 1, 2, 3, 4, 2, 3, 4, 5, 6]]
    assert delta == -3


@pytest.mark.parametrize("run", [ImageRun(2, 5, 0, 0), ImageRun(2, 6, 0, 1), ImageRun(6, 6, 0, 0)])
def test_rope_positions_of_partial_images_are_refused(run: ImageRun) -> None:
    with pytest.raises(ValueError, match="does not fit a grid"):
        rope_positions(10, [run], [(2, 3)])
