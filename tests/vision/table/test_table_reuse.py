"""Cached prefixes with images: found again as far as pixels are equal, in memory and on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.models.seeing import GOLDEN, cases, seeing, seeing_engine
from support.vision.table import answers, error, limit, logits_in, messages_with_pictures, negative, plain_logits, prompt, sees

from mlxinfer import LLM
from mlxinfer.cache.base import PAGE, RecurrentSpec


def _lasts(name: str) -> bool:
    """False for models with states, whose prefixes are only stored at some lengths."""
    return not any(isinstance(spec, RecurrentSpec) for spec in seeing(name).model.layers)


@sees("prefix reuse")
def test_prefixes_end_before_within_and_after_an_image(name: str) -> None:
    """A page ends at each of these places. The second prompt begins with the cached pages of the first, and answers as without a cache."""
    whole = prompt(name, "two")
    first, end = whole.ranges[1]
    for place, reach in (("before", first), ("within", (first + end) // 2), ("after", end)):
        shift = PAGE + (-reach) % PAGE
        asked, reach = whole.behind(shift), shift + reach
        engine = seeing_engine(name, max_num_batched_tokens=16)
        other = [negative(picture) if number else picture for number, picture in enumerate(cases(name)["two"].pictures)]
        beginning = (asked.with_pictures(other) if place == "before" else asked).request()
        engine.add(beginning)
        while beginning.num_computed_tokens < reach:
            engine.step()
        if place == "within":  # it ends while its image is read
            engine.abort(beginning)
        while not engine.idle:
            engine.step()
        again = asked.request()
        assert answers(engine, again) == answers(seeing_engine(name, prefix_cache=False), asked.request()), place
        if _lasts(name) and (place != "within" or not asked.images.spans):
            assert again.reused_tokens >= reach, place
        elif _lasts(name):
            assert not any(first < again.reused_tokens < end for first, end in asked.images.spans), "a span is reused whole or not at all"
        if place == "before":
            assert again.reused_tokens <= asked.ranges[1][0]


@sees("another picture")
def test_another_picture_under_the_same_ids(name: str) -> None:
    """The second prompt reuses nothing from the picture on, and has another answer."""
    asked = prompt(name, "one").behind(PAGE)
    other = asked.with_pictures([negative(picture) for picture in cases(name)["one"].pictures])
    assert asked.ids == other.ids
    engine = seeing_engine(name)
    answers(engine, asked.request())
    again = other.request()
    answers(engine, again)
    assert again.reused_tokens <= asked.ranges[0][0]
    assert again.images_cached == 0
    expected = plain_logits(other)
    found = logits_in(engine, other)
    assert error(found, expected) < limit(name, expected)
    assert error(found, plain_logits(asked)) > 100 * limit(name, expected)


@sees("turns")
def test_a_second_picture_keeps_the_first_turn(name: str) -> None:
    """Turn two, with a picture of its own, begins with the pages of turn one."""
    whole = prompt(name, "turns").behind(PAGE)
    one = whole.up_to(whole.ranges[0][1] + 8)
    engine = seeing_engine(name)
    answers(engine, one.request(1))
    second = whole.request()
    found = answers(engine, second)
    assert found == answers(seeing_engine(name, prefix_cache=False), whole.request())
    assert second.reused_tokens >= PAGE
    if _lasts(name):
        assert second.reused_tokens >= len(one.ids) // PAGE * PAGE
        assert second.images_cached >= (one.ranges[0][1] <= len(one.ids) // PAGE * PAGE)


@pytest.mark.long
@sees("disk")
def test_pages_come_back_from_disk(name: str, tmp_path: Path) -> None:
    """A new process finds the prompt's pages by the pixels, and needs no tower for an image within them.

    Text of more than a page follows the images, so that a page ends outside all spans.
    """
    options = {"dtype": "float32", "memory_gb": 1, "max_context": 768, "prefix_disk_gb": 0.1, "prefix_dir": tmp_path}
    messages = messages_with_pictures(name, "two")
    messages[-1]["content"].append({"type": "text", "text": " and then" * 2 * PAGE})
    answers = []
    for turn in range(2):
        with LLM(GOLDEN / name, **options) as llm:
            answers.append(llm.chat(messages, temperature=0, max_tokens=16, ignore_eos=True))
            assert (answers[-1].usage.stats.reused_tokens >= PAGE) == bool(turn)
            assert (answers[-1].usage.stats.images_cached > 0) == bool(turn)
    assert answers[0].token_ids == answers[1].token_ids
