"""Options of requests, their statistics, and requests that run together."""

from __future__ import annotations

import asyncio
import json

import pytest
from support.models.tiny_directory import tiny_directory

from mlxinfer import LLM, AsyncLLM, MLXInferError, SamplingParams
from mlxinfer.engine.request_keywords import RequestOptions
from mlxinfer.engine.text.input_processor import message_ends, with_message
from mlxinfer.errors import DraftError, QueueFullError, SamplingError

GREEDY = SamplingParams(temperature=0, max_tokens=12)
LONG = SamplingParams(temperature=0, max_tokens=200)
PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_directory(tmp_path_factory.mktemp("model"), eos=False)


@pytest.fixture
def llm(folder):
    with LLM(folder) as llm:
        yield llm


@pytest.mark.long
def test_more_prompts_than_can_wait_are_fed_as_there_is_room(folder, llm):
    prompts = [[5 + i % 80] for i in range(500)]
    few = SamplingParams(temperature=0, max_tokens=2)
    with LLM(folder, max_num_seqs=3, max_waiting=4) as small:
        answers = small.generate(prompts, few)
        assert [a.token_ids for a in answers] == [a.token_ids for a in llm.generate(prompts, few)]
        assert small.stats().requests == 500
        with small._client.turn() as outputs:
            waiting = [outputs.submit(_sequences(small, [5], LONG)) for _ in range(4)]
        with pytest.raises(QueueFullError):
            next(small.stream(PROMPT, LONG))
        assert len(small.generate(prompts[:50], few)) == 50
        with small._client.turn() as outputs:
            while outputs.answers:
                outputs.step()
        assert {len(answer.sequence.answer) for (answer,) in waiting} == {200}


def _sequences(llm: LLM, ids: list[int], params: SamplingParams):
    return llm._client.opened.inputs.sequences(ids, params, RequestOptions())


def test_a_full_waiting_list_refuses_and_nobody_else_notices(folder):
    async def use():
        async with AsyncLLM(folder, max_num_seqs=1, max_waiting=2) as llm:
            asked = [llm.generate(PROMPT, LONG) for _ in range(8)]
            return await asyncio.gather(*asked, return_exceptions=True)

    results = asyncio.run(use())
    refused = [r for r in results if isinstance(r, QueueFullError)]
    assert 1 <= len(refused) <= 6
    assert all(len(r[0].token_ids) == 200 for r in results if r not in refused)


def test_time_that_is_up_ends_an_answer_with_what_it_has(llm):
    whole = llm.generate(PROMPT, LONG)[0]
    stream = llm.stream(PROMPT, LONG, timeout_s=1000)
    first = next(stream)
    running = next(iter(llm._client.outputs.answers))
    running.deadline = 0.0  # so that no test has to wait
    chunks = [first, *stream]
    assert chunks[-1].finish_reason == "timeout"
    assert chunks[-1].usage.completion_tokens < 200
    assert whole.text.startswith("".join(chunk.text for chunk in chunks))
    assert llm.stats().running == 0


def test_a_request_that_waited_too_long_has_nothing(llm):
    answer = llm.generate(PROMPT, LONG, timeout_s=1e-9)[0]
    assert (answer.finish_reason, answer.token_ids, answer.text) == ("timeout", [], "")


def test_an_async_answer_ends_with_its_time(folder):
    async def use():
        async with AsyncLLM(folder) as llm:
            answer, other = await asyncio.gather(llm.generate(PROMPT, LONG, timeout_s=1e-9), llm.generate(PROMPT, GREEDY))
            return answer[0].finish_reason, other[0].finish_reason

    assert asyncio.run(use()) == ("timeout", "length")


@pytest.mark.parametrize(
    "terms",
    [
        {"timeout_s": 0},
        {"timeout_s": -1},
        {"timeout_s": float("nan")},
        {"timeout_s": float("inf")},
        {"timeout_s": "1"},
        {"timeout_s": True},
        {"priority": 1.5},
        {"priority": True},
        {"priority": 2**40},
        {"client_id": None},
        {"client_id": "x" * 1000},
    ],
)
def test_terms_without_a_meaning_are_refused(llm, terms):
    for ask in (llm.generate, llm.stream):
        with pytest.raises(SamplingError, match=next(iter(terms))):
            ask(PROMPT, GREEDY, **terms)
    assert llm.engine.idle


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_sequences": 0},
        {"max_num_seqs": 1.5},
        {"memory_gb": 0},
        {"memory_gb": float("nan")},
        {"memory_gb": "8"},
        {"prefix_disk_gb": -1.0},
        {"prefix_cache": 1},
        {"max_waiting": 0},
        {"decode_share": 0},
        {"decode_share": 1.1},
        {"max_step_s": float("inf")},
        {"memory_gb": 0.001},
        {"max_num_seqs": 100_000},
    ],
)
def test_settings_without_a_meaning_are_refused(folder, wrong):
    with pytest.raises(MLXInferError):
        LLM(folder, **wrong)


def test_what_a_request_took_is_told(llm):
    ids = [5 + i % 80 for i in range(150)]
    cold, warm = llm.generate(ids, GREEDY)[0].usage, llm.generate(ids, GREEDY)[0].usage
    assert cold.stats.reused_tokens == 0
    assert warm.stats.reused_tokens == 149
    assert warm.stats.prefill_s > 0 < warm.stats.decode_s
    sums = llm.stats()
    assert (sums.requests, sums.prompt_tokens, sums.completion_tokens, sums.reused_tokens) == (2, 300, 24, 149)
    assert sums.pages_used == 0 < sums.pages_cached <= sums.pages


def test_a_miss_is_told_with_its_message(tmp_path):
    with LLM(tiny_directory(tmp_path)) as llm:
        first = [[1, 7, 7, 2], [8, 8, 2], [9] * 70 + [2]]
        llm.generate([token for message in first for token in message], GREEDY)
        other = [*first[0], *first[1], *[10] * 70]
        stats = llm.generate(other, GREEDY)[0].usage.stats
    assert stats.miss.endswith(", message 3")


def test_messages_are_counted_by_their_ends():
    ids = [1, 5, 2, 6, 6, 2, 7]
    assert message_ends(ids, {2}) == [3, 6]
    assert with_message("diverged at token 4", ids, {2}) == "diverged at token 4, message 2"
    assert with_message("diverged at token 6", ids, {2}) == "diverged at token 6, message 3"
    assert with_message("diverged at token 4", ids, set()) == "diverged at token 4"
    assert with_message("nothing cached begins like this", ids, {2}) == "nothing cached begins like this"


def test_only_the_last_ends_of_messages_are_kept(tmp_path):
    with LLM(tiny_directory(tmp_path)) as llm:
        (sequence,) = _sequences(llm, [5, 2] * 9, GREEDY)
    assert sequence.snapshot_points == (10, 12, 14, 16)


def test_a_draft_model_changes_no_answer(folder, llm):
    with LLM(folder, draft=folder) as drafted:
        answer = drafted.generate(PROMPT, LONG)[0]
    assert answer.token_ids == llm.generate(PROMPT, LONG)[0].token_ids


def test_a_draft_model_of_another_vocabulary_is_refused(folder, tmp_path):
    other = tiny_directory(tmp_path, eos=False)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    a, b = list(vocabulary)[10:12]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(DraftError, match="vocabulary"):
        LLM(folder, draft=other)
