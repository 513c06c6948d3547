"""Prefixes with images are reused up to, inside and past an image, and by forks and later turns."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from support.engines.tiny_engine import run
from support.models.seeing import case_request, cases, seeing_engine, seeing_request

from mlxinfer.cache.kv_format import KVFormat

KV = {"16": None, "8": KVFormat(8), "4": KVFormat(4)}


def padded(length: int) -> list[dict[str, Any]]:
    """The messages of a case, with so many more letters before the picture."""
    found: list[dict[str, Any]] = json.loads(json.dumps(cases()["one"].messages))
    found[-1]["content"].insert(0, {"type": "text", "text": "x" * length})
    return found


@pytest.mark.parametrize("length", [0, 1, 17, 30, 45, 63])
def test_pages_may_end_anywhere_in_an_image(length: int) -> None:
    shown = cases()["one"].pictures
    expected = run(seeing_engine(prefix_cache=False, max_num_batched_tokens=500), [seeing_request(padded(length), shown)])
    engine = seeing_engine(max_num_batched_tokens=40)
    first, second = seeing_request(padded(length), shown), seeing_request(padded(length), shown)
    assert run(engine, [first]) == run(engine, [second]) == expected
    assert second.reused_tokens >= 64
    assert (first.images_cached, second.images_cached) == (0, 1)
    assert second.image_encode_s == 0


@pytest.mark.parametrize("form", sorted(KV))
@pytest.mark.parametrize("steps", [2, 4, 6, 8])
def test_a_prefix_that_ends_inside_an_image_is_continued(steps: int, form: str) -> None:
    expected = run(seeing_engine(kv=KV[form], prefix_cache=False), [case_request("two")])
    engine = seeing_engine(kv=KV[form], max_num_batched_tokens=16, max_step_s=1000.0, image_features_bytes=0)
    first, second = case_request("two"), case_request("two")
    engine.add(first)
    while len([run for run in first.images.runs if run.start < first.num_computed_tokens]) < steps:
        engine.step()
    engine.abort(first)
    while not engine.idle:
        engine.step()
    engine._collect_pending([])
    assert run(engine, [second]) == expected
    assert second.reused_tokens > first.images.runs[0].start
    assert second.image_encode_s > 0


def test_a_later_turn_reuses_the_images_of_earlier_ones() -> None:
    case = cases()["turns"]
    turn = next(place for place, each in enumerate(case.messages) if each["role"] == "assistant")
    engine = seeing_engine()
    first, second = seeing_request(case.messages[:turn], case.pictures[:1], 1), case_request("turns")
    run(engine, [first])
    assert run(engine, [second]) == [case.greedy]
    assert second.reused_tokens >= first.images.runs[-1].start + first.images.runs[-1].count
    assert (second.images_cached, len(second.images.images)) == (1, 2)
    stats = engine.stats()
    assert (stats.images, stats.images_cached) == (3, 1)
    assert stats.image_tokens == first.images.tokens + second.images.tokens
    assert stats.image_encode_s == first.image_encode_s + second.image_encode_s > 0


def test_a_changed_picture_of_a_later_turn_keeps_the_earlier_ones() -> None:
    case = cases()["turns"]
    other = [case.pictures[0], np.ascontiguousarray(case.pictures[1][::-1])]
    expected = run(seeing_engine(prefix_cache=False), [seeing_request(case.messages, other)])
    engine = seeing_engine()
    assert run(engine, [case_request("turns")]) == [case.greedy]
    second = seeing_request(case.messages, other)
    assert run(engine, [second]) == expected
    later = next(run for run in second.images.runs if run.image == 1)
    assert second.images.runs[0].start < second.reused_tokens <= later.start
    assert second.images_cached == 1


def test_samples_of_a_prompt_with_an_image_fork() -> None:
    def samples() -> list[Any]:
        return [case_request("two", 8, index=i, temperature=1.0, seed=11) for i in range(4)]

    separate = [run(seeing_engine(), [each])[0] for each in samples()]
    for seats in (8, 2, 1):
        leader, *rest = everyone = samples()
        leader.lead(rest)
        run(seeing_engine(max_num_seqs=seats, max_num_batched_tokens=30), [leader])
        assert [each.answer for each in everyone] == separate
    assert len(set(map(tuple, separate))) > 1


@pytest.mark.parametrize("form", ["8", "4"])
def test_quantized_pages_do_not_depend_on_the_schedule(form: str) -> None:
    names = sorted(cases())
    alone = [run(seeing_engine(kv=KV[form], max_num_batched_tokens=500), [case_request(name)])[0] for name in names]
    assert run(seeing_engine(kv=KV[form], max_num_batched_tokens=23), [case_request(name) for name in names]) == alone
