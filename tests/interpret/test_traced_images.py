"""Traces of prompts with images: logits of transformers, patterns that explain the heads, and values over patches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.models.seeing import GOLDEN, cases

from mlxinfer import LLM
from mlxinfer.errors import SettingError
from mlxinfer.interpret.trace import Trace
from mlxinfer.notebook import image_picture

FAMILIES = ("smolvlm", "mistral3", "gemma3", "qwen3_vl", "internvl")
STRIDE = 5
"""Golden files have every fifth logit of a row."""


@pytest.fixture(scope="module", params=FAMILIES)
def traced(request: pytest.FixtureRequest) -> Iterator[tuple[str, LLM, Trace]]:
    with LLM(GOLDEN / request.param, dtype="float32", max_context=1024) as llm:
        trace = llm.trace(prompt_of(llm, request.param, "two"), what=["residual", "attention", "heads", "kv", "logits"])
        yield request.param, llm, trace


def prompt_of(llm: LLM, family: str, case: str) -> Any:
    found = cases(family)[case]
    pictures = iter(found.pictures)
    messages = [
        {**message, "content": [{**part, "image": next(pictures)} if part["type"] == "image" else part for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in found.messages
    ]
    return llm.chat_prompt(messages)


def test_logits_are_those_of_transformers(traced: tuple[str, LLM, Trace]) -> None:
    family, _, trace = traced
    with np.load(GOLDEN / family / "reference.npz") as reference:
        expected = reference["two_logits"]
    assert np.abs(np.array(trace["logits"])[:, ::STRIDE] - expected).max() < 1e-4 * np.abs(expected).max()


def test_patterns_and_values_give_the_heads(traced: tuple[str, LLM, Trace]) -> None:
    """The weights of a pattern add up to one, and times the values they are the result of the head."""
    _, _, trace = traced
    for layer, pattern in trace["attention"].items():
        values = trace["kv"][layer][1].swapaxes(0, 1)
        values = mx.repeat(values, pattern.shape[0] // values.shape[0], axis=0)
        assert mx.allclose(pattern.sum(axis=-1), mx.ones(pattern.shape[:2]), atol=1e-5)
        assert mx.abs(pattern @ values - trace["heads"][layer]).max().item() < 1e-4


def test_rows_of_an_image_see_later_ones_where_the_family_does(traced: tuple[str, LLM, Trace]) -> None:
    family, _, trace = traced
    rows = trace.images[0].rows.reshape(-1).tolist()
    ahead = max(float(pattern[:, rows[0], rows[1] :].max().item()) for pattern in trace["attention"].values())
    assert (ahead > 0) == (family == "gemma3")


def test_each_row_has_a_place(traced: tuple[str, LLM, Trace]) -> None:
    _, _, trace = traced
    assert len(trace.images) == 2
    for number, image in enumerate(trace.images, 1):
        for (row, column), place in np.ndenumerate(image.rows):
            assert trace.tokens[place] == f"[image {number} ({row}, {column})]"
        assert len(set(image.rows.reshape(-1).tolist())) == image.rows.size
        places = np.arange(len(trace), dtype=np.float32)
        assert np.array_equal(image.patches(places), image.rows)
    whole = np.isnan(np.array(trace.surprisal())).sum()
    assert whole == sum(image.rows.size for image in trace.images)


def test_values_are_drawn_over_the_picture(traced: tuple[str, LLM, Trace]) -> None:
    family, _, trace = traced
    layer = max(trace["attention"])
    picture = cases(family)["two"].pictures[1]
    drawn = image_picture(trace, trace["attention"][layer][0, -1], 1, picture=picture, title="from the last token", label="weight")
    below, above = drawn.figure.axes[0].images
    assert above.get_array().shape == trace.images[1].rows.shape
    assert tuple(below.get_extent()) == tuple(above.get_extent())
    assert drawn._repr_png_()[:4] == b"\x89PNG"
    with pytest.raises(SettingError, match="image 2 is not one of the 2"):
        image_picture(trace, trace["logits"][:, 0], 2)
    with pytest.raises(SettingError, match="one for each token"):
        image_picture(trace, trace["logits"])


def test_text_has_no_images(traced: tuple[str, LLM, Trace]) -> None:
    _, llm, _ = traced
    assert llm.trace("hello", what="logits").images == ()
