"""Images whose rows see one another (Gemma): answers are those of transformers in chunks of any size, and of the same digits with a
quantized cache."""

from __future__ import annotations

import numpy as np
import pytest
from support.engines.tiny_engine import UNMEASURED, run
from support.models.image_prompts import config_of
from support.models.seeing import Picture, case_request, cases, images_of, seeing, seeing_engine, seeing_request

from mlxinfer.cache.base import whole_spec
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.engine.core.schedule import Schedule
from mlxinfer.engine.core.sequence import Sequence
from mlxinfer.sampling import sample_seed
from mlxinfer.types import SamplingParams

FAMILIES = ["gemma3", "gemma4", "gemma4_unified"]
NAMES = ["one", "text", "turns", "two"]
LONG = [name if name == "two" else pytest.param(name, marks=pytest.mark.long) for name in NAMES]
KV = [KVFormat(8, 8), KVFormat(4, 4)]


def text_request(limit: int = 16) -> Sequence:
    tokens = [7, 31, 5, 100, 42, 9, 9, 250, 3] * 8
    return Sequence(tokens, SamplingParams(temperature=0.0), 0, len(tokens) + limit)


def sizes(family: str, name: str) -> list[int]:
    """Rows of a step: few, around the first span, around its end, and all."""
    spans = case_request(name, family=family).images.spans if name != "text" else ((9, 40),)
    first, end = spans[0]
    return [1, 16, *range(end - first - 1, end - first + 2), first + 1, end - 1, end, end + 1, 500]


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("family", [*FAMILIES, "gemma4_e"])
def test_greedy_answers_of_any_chunks(family: str, name: str) -> None:
    seen = sizes(family, name) if family != "gemma4_e" else [1, 16, 500]
    for rows in seen:
        engine = seeing_engine(family, max_num_batched_tokens=rows, max_num_seqs=1)
        answer = comparable(run(engine, [case_request(name, family=family)])[0], family)
        assert answer == comparable(cases(family)[name].greedy, family), rows


def comparable(answer: list[int], family: str) -> list[int]:
    """The answer up to a sampled placeholder, in whose place transformers looks up the padding token."""
    placeholders = {config_of(family).get(f"{kind}_token_id") for kind in ("image", "audio", "video")}
    return answer[: next((i + 1 for i, token in enumerate(answer) if token in placeholders), len(answer))]


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_have_spans_where_layers_see_them(family: str) -> None:
    specs = [whole_spec(spec) for spec in seeing(family).model.layers]
    assert [spec.sees_spans for spec in specs] == [family != "gemma4" or spec.window is not None for spec in specs]
    assert len(case_request("two", family=family).images.spans) == 2
    assert not any(whole_spec(spec).sees_spans for spec in seeing("gemma4_e").model.layers)
    assert not case_request("two", family="gemma4_e").images.spans


@pytest.mark.parametrize("kv", [None, *KV], ids=lambda kv: kv.name if kv else "16")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantized_cache_has_the_same_answers_in_any_schedule(family: str, kv: KVFormat | None) -> None:
    """In chunks of any size, beside text and other images, and after a preemption."""

    def requests() -> list[Sequence]:
        return [*(case_request(name, family=family) for name in NAMES), text_request()]

    alone = [run(seeing_engine(family, kv, max_num_batched_tokens=500, prefix_cache=False), [request])[0] for request in requests()]
    for rows in (7, 50, 500):
        assert run(seeing_engine(family, kv, max_num_batched_tokens=rows, max_num_seqs=6, **UNMEASURED), requests()) == alone
    engine = seeing_engine(family, kv, max_num_batched_tokens=16, max_num_seqs=3, **UNMEASURED)
    schedule, calls = engine.scheduler.schedule, []

    def sometimes_preempting() -> Schedule:
        calls.append(0)
        return Schedule(preempt=[engine.scheduler.running[-1]]) if len(calls) % 9 == 4 and engine.scheduler.running else schedule()

    engine.scheduler.schedule = sometimes_preempting
    assert run(engine, requests()) == alone
    assert engine.stats().preemptions > 3


@pytest.mark.parametrize("family", FAMILIES)
def test_deterministic_answers_to_the_bit(family: str) -> None:
    def logprobs(company: int, rows: int) -> list[float]:
        engine = seeing_engine(family, max_num_batched_tokens=rows, deterministic=True, prefix_cache=company > 0, **UNMEASURED)
        found: list[float] = []
        target = case_request("two", family=family, logprobs=1)
        for each in [*(case_request(NAMES[i], family=family) for i in range(company)), target]:
            engine.add(each)
        while not engine.idle:
            found += [event.logprob for event in engine.step() if event.sequence is target]
        return found

    alone = logprobs(0, 71)
    assert len(alone) == 16
    assert logprobs(4, 71) == alone == logprobs(2, 500)


@pytest.mark.parametrize("kv", [None, KVFormat(4, 4)], ids=["16", "4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefix_is_reused_up_to_and_past_an_image_but_not_inside(family: str, kv: KVFormat | None) -> None:
    case = cases(family)["two"]

    def request(second: Picture) -> Sequence:
        return seeing_request(case.messages, [case.pictures[0], second], family=family)

    def alone(second: Picture) -> list[int]:
        return run(seeing_engine(family, kv, prefix_cache=False), [request(second)])[0]

    same, other = case.pictures[1], np.ascontiguousarray(case.pictures[1][::-1])
    engine, first = seeing_engine(family, kv), request(same)
    (_, end), (start, _) = first.images.spans
    first.snapshot_points = (end + 3, start)
    assert run(engine, [first]) == [alone(same)]
    again, another = request(same), request(other)
    assert run(engine, [again]) == [alone(same)]
    assert (again.reused_tokens, again.images_cached) == (len(again.prompt) - 1, 2)
    assert run(engine, [another]) == [alone(other)]
    assert (another.reused_tokens, another.images_cached) == (start, 1)
    assert alone(other) != alone(same)
    cut = [*first.keys()[: end - 4], 1, 2, 3]
    found = [engine.cache.find(cut, "", spans).reused for spans in ((), first.images.spans)]
    assert found[0] == end - 4
    assert found[1] <= first.images.spans[0][0]


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_fork_after_the_image(family: str) -> None:
    engine = seeing_engine(family, max_num_batched_tokens=32)
    samples = [case_request("one", family=family, index=index, temperature=0.8, seed=3) for index in range(4)]
    alone = [
        run(seeing_engine(family), [case_request("one", family=family, index=index, temperature=0.8, seed=3)])[0] for index in range(4)
    ]
    samples[0].lead(samples[1:])
    engine.add(samples[0])
    while not engine.idle:
        engine.step()
    assert [sample.answer for sample in samples] == alone
    assert len(set(map(tuple, alone))) > 1


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_samples_of_a_prompt_that_ends_within_an_image(family: str, deterministic: bool) -> None:
    """No sample can fork before the last token, which sees the rows before it."""
    whole = case_request("one", family=family)
    end = whole.images.spans[-1][1]
    images = images_of(whole.prompt[:end], whole.images.images, family)

    def sample(index: int) -> Sequence:
        params = SamplingParams(temperature=0.8, seed=3)
        return Sequence(whole.prompt[:end], params, sample_seed(3, index), end + 8, index=index, images=images)

    settings = {"deterministic": deterministic}
    alone = [run(seeing_engine(family, **settings), [sample(index)])[0] for index in range(3)]
    engine, samples = seeing_engine(family, **settings), [sample(index) for index in range(3)]
    samples[0].lead(samples[1:])
    engine.add(samples[0])
    while not engine.idle:
        engine.step()
    assert [each.answer for each in samples] == alone


@pytest.mark.parametrize("family", FAMILIES)
def test_deterministic_text_beside_an_image(family: str) -> None:
    """The answer of a text does not depend on an image that is computed in the same step, after it."""
    settings = {"deterministic": True, "prefix_cache": False, **UNMEASURED}
    alone = run(seeing_engine(family, **settings), [text_request(30)])[0]
    engine, text, pictured = seeing_engine(family, **settings), text_request(30), case_request("two", family=family)
    engine.add(text)
    while len(text.answer) < 3:
        engine.step()
    engine.add(pictured)
    while not engine.idle:
        engine.step()
    assert text.answer == alone
    assert comparable(pictured.answer, family) == comparable(cases(family)["two"].greedy, family)
