"""Text models with image rows: given features, rows added after blocks, and rotary positions that are not indices."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from support.models.image_prompts import ImageReader, Prompt, config_of, prompt_of, relative_error, text_model

from mlxinfer import kernels_cpu

FAMILIES = ["smolvlm", "idefics3", "mistral3", "ministral3", "internvl", "lfm2_vl"]
MROPE = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]
DEEPSTACK = ["qwen3_vl", "qwen3_vl_moe"]
SPANS = ["gemma3", "gemma4", "gemma4_unified"]
CASES = ["one", "two"]
CLOSE = 1e-4


def reader(family: str, way: str) -> ImageReader:
    if way == "native" and not kernels_cpu.in_use():
        pytest.skip(kernels_cpu.status())
    model = text_model(family, packed=way == "native")
    if way == "native":
        assert all(run.native is not None for run in model.runs), "blocks that the CPU kernels cannot run"
    if way == "joined":
        model = copy.copy(model)
        model.joined = True
    return ImageReader(model, paged=way in ("paged", "native"))


def chunks_of(prompt: Prompt, size: int) -> list[int]:
    return [min(size, len(prompt) - start) for start in range(0, len(prompt), size)]


def chunks_around_images(prompt: Prompt, size: int) -> list[int]:
    """Chunks of `size` rows that divide no image: they end before it, or with it."""
    ends = [0]
    while ends[-1] < len(prompt):
        past, end = ends[-1], min(ends[-1] + size, len(prompt))
        ends.append(next((last if first <= past else first for first, last in prompt.images if first < end < last), end))
    return [end - past for past, end in pairwise(ends)]


@pytest.mark.parametrize("way", ["plain", "joined", "paged", "native"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES + MROPE)
def test_logits_and_answers_are_those_of_transformers(family: str, case: str, way: str) -> None:
    prompt = prompt_of(family, case)
    for size in (len(prompt), 29):
        read = reader(family, way)
        slot, logits = read.read_prompt(prompt, chunks_of(prompt, size))
        assert relative_error(logits, prompt) < CLOSE
        assert read.answer(slot, logits, len(prompt.greedy), prompt.shift) == prompt.greedy


@pytest.mark.parametrize("way", ["plain", "joined", "paged", "native"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", [*SPANS, "gemma4_e"])
def test_logits_of_images_in_one_chunk_are_those_of_transformers(family: str, case: str, way: str) -> None:
    prompt = prompt_of(family, case)
    (first, end), *_ = prompt.images
    for size in (len(prompt), 29, first + 1, end - 1, end, end + 1):
        read = reader(family, way)
        assert read.spans == (family in SPANS)
        slot, logits = read.read_prompt(prompt, chunks_around_images(prompt, size))
        assert relative_error(logits, prompt) < CLOSE
    placeholders = {config_of(family).get(f"{kind}_token_id") for kind in ("image", "audio")}
    if not placeholders & set(prompt.greedy):  # transformers looks up the padding token in the place of a sampled one
        assert read.answer(slot, logits, len(prompt.greedy), 0) == prompt.greedy


@pytest.mark.parametrize("way", ["plain", "native"])
@pytest.mark.parametrize("family", SPANS)
def test_causal_images_give_other_logits(family: str, way: str) -> None:
    prompt, read = prompt_of(family, "one"), reader(family, way)
    read.spans = False
    assert relative_error(read.read_prompt(prompt, [len(prompt)])[1], prompt) > 1000 * CLOSE


@pytest.mark.parametrize("family", FAMILIES + MROPE)
def test_the_model_says_how_many_axes_its_positions_have(family: str) -> None:
    assert text_model(family, packed=False).mrope == (family in MROPE)


@pytest.mark.parametrize("way", ["plain", "native"])
@pytest.mark.parametrize("family", MROPE)
def test_wrong_positions_give_other_logits(family: str, way: str) -> None:
    prompt = prompt_of(family, "two")
    assert prompt.rope is not None
    indices = replace(prompt, rope=None)
    assert relative_error(reader(family, way).read_prompt(indices, chunks_of(prompt, 64))[1], prompt) > 100 * CLOSE
    last = int(np.flatnonzero(prompt.is_image)[-1]) + 1
    read = reader(family, way)
    _, logits = read.read_prompt(prompt, [last, len(prompt) - last], shift=0)
    assert relative_error(logits, prompt) > 100 * CLOSE
    assert relative_error(logits[:last], replace(prompt, logits=prompt.logits[:last])) < CLOSE


@pytest.mark.parametrize("way", ["plain", "joined", "native"])
@pytest.mark.parametrize("family", DEEPSTACK)
def test_every_deepstack_layer_counts(family: str, way: str) -> None:
    prompt = prompt_of(family, "one")
    for layer in range(len(prompt.deepstack)):
        changed = prompt.deepstack.copy()
        changed[layer] = 0
        _, logits = reader(family, way).read_prompt(replace(prompt, deepstack=changed), [len(prompt)])
        assert relative_error(logits, prompt) > 100 * CLOSE


@pytest.mark.parametrize("way", ["paged", "native"])
@pytest.mark.parametrize("family", ["smolvlm", *MROPE])
def test_a_row_depends_on_its_own_sequence_only(family: str, way: str) -> None:
    """An answer after two images, decoded alone, and in steps with the prompt of another sequence, has equal digits."""
    first, second = prompt_of(family, "two"), prompt_of(family, "one")
    alone, together = reader(family, way), reader(family, way)
    slot, logits = alone.read_prompt(first, chunks_of(first, 64))
    other, again = together.read_prompt(first, chunks_of(first, 64))
    np.testing.assert_array_equal(logits, again)
    third = together.open()
    for token, count in zip(first.greedy, chunks_of(second, 13), strict=False):
        (row,) = alone.read((slot, [token], first.shift))
        row_again, part = together.read((other, [token], first.shift), (third, second, count))
        if way == "native":
            np.testing.assert_array_equal(row, row_again)
        assert np.abs(row - row_again).max() < CLOSE * np.abs(row).max()
        assert part.shape[0] == count
