"""Chat completions: OpenAI's own client against a live server."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from support.http.live_server import LiveServer
from support.processes.optional import needs

if TYPE_CHECKING:
    from openai import OpenAI

openai = needs("openai")

MESSAGES: Any = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]


def create(client: OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 12, **more})


def text_of(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def test_an_answer(client: OpenAI) -> None:
    answer = create(client)
    (choice,) = answer.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert (answer.model, answer.object) == ("tiny", "chat.completion")
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert choice.message.content
    assert choice.logprobs is None


def test_a_stream_has_the_same_text_one_role_one_reason_and_no_usage(client: OpenAI) -> None:
    chunks = list(create(client, stream=True))
    choices = [chunk.choices[0] for chunk in chunks]
    assert text_of(chunks) == create(client).choices[0].message.content
    assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert choices[-1].delta.content is None
    assert all(choice.delta.content for choice in choices[1:-1])
    assert {chunk.usage for chunk in chunks} == {None}
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1


def test_usage_comes_in_a_chunk_of_its_own_where_asked_for(unix_client: OpenAI) -> None:
    *chunks, last = create(unix_client, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage.completion_tokens == 12
    assert {chunk.usage for chunk in chunks} == {None}
    assert last.id == chunks[0].id
    assert all(chunk.choices for chunk in create(unix_client, stream=True, stream_options={"include_usage": False}))


def test_several_answers(client: OpenAI) -> None:
    settings: dict[str, Any] = {"n": 3, "temperature": 1.5, "seed": 7}
    whole = create(client, **settings)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert whole.usage.completion_tokens == 36
    chunks = list(create(client, stream=True, **settings))
    assert [text_of(chunks, index) for index in range(3)] == texts
    reasons = [(choice.index, choice.finish_reason) for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert sorted(reasons) == [(0, "length"), (1, "length"), (2, "length")]


def test_logprobs(client: OpenAI) -> None:
    content = create(client, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert len(content) == 12
    for token in content:
        assert bytes(token.bytes).decode() == token.token
        assert [top.logprob for top in token.top_logprobs] == sorted((top.logprob for top in token.top_logprobs), reverse=True)
        assert token.top_logprobs[0].token == token.token  # greedy
        assert math.isclose(token.top_logprobs[0].logprob, token.logprob)
    streamed = [choice.logprobs for chunk in create(client, stream=True, logprobs=True, top_logprobs=3) for choice in chunk.choices]
    assert [token for logprobs in streamed if logprobs for token in logprobs.content] == content
    assert all(token.top_logprobs == [] for token in create(client, logprobs=True).choices[0].logprobs.content)


def test_stop_strings_are_not_part_of_the_answer(client: OpenAI) -> None:
    text = create(client).choices[0].message.content
    stop = text[4:7]
    expected = text[: text.index(stop)]
    for stops in (stop, ["never", stop]):
        answer = create(client, stop=stops).choices[0]
        assert (answer.message.content, answer.finish_reason) == (expected, "stop")
        chunks = list(create(client, stop=stops, stream=True))
        assert text_of(chunks) == expected
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_same_seed_gives_the_same_answer(unix_client: OpenAI) -> None:
    texts = [create(unix_client, temperature=1.5, seed=seed).choices[0].message.content for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_fields_of_other_engines(unix_client: OpenAI) -> None:
    greedy = create(unix_client).choices[0].message.content
    assert create(unix_client, temperature=2, extra_body={"top_k": 1}).choices[0].message.content == greedy
    biased = create(unix_client, logit_bias={"40": 100}, max_tokens=None, max_completion_tokens=3).choices[0].message.content
    assert len(set(biased)) == 1


def test_parts_and_the_developer_are_what_text_and_the_system_are(unix_client: OpenAI) -> None:
    parts = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": t} for t in ("Hel", "lo")]},
    ]
    assert create(unix_client, messages=parts).choices[0].message.content == create(unix_client).choices[0].message.content


def test_a_prompt_that_was_read_before_is_counted(unix_client: OpenAI) -> None:
    messages = [{"role": "user", "content": "A long beginning. " * 20}]
    create(unix_client, messages=messages)
    again = create(unix_client, messages=messages).usage
    assert 0 < again.prompt_tokens_details.cached_tokens < again.prompt_tokens


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list()
    assert model.id == "tiny"
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_nothing_is_left_behind(live: LiveServer, unix_client: OpenAI) -> None:
    create(unix_client)
    assert live.until(lambda s: not s.running).pages_used == 0


@pytest.mark.parametrize("way", ["chat", "completions", "responses"])
def test_a_prompt_is_shared_with_those_of_the_same_salt_only(unix_client: OpenAI, way: str) -> None:
    text = f"A secret of some pages, by {way}. " * 20

    def cached(salt: str | None) -> int:
        extra = {} if salt is None else {"cache_salt": salt}
        if way == "chat":
            usage = create(unix_client, messages=[{"role": "user", "content": text}], extra_body=extra).usage
        elif way == "completions":
            usage = unix_client.completions.create(model="tiny", prompt=text, max_tokens=2, extra_body=extra).usage
        else:
            answer = unix_client.responses.create(model="tiny", input=text, max_output_tokens=2, extra_body=extra)
            return answer.usage.input_tokens_details.cached_tokens
        return usage.prompt_tokens_details.cached_tokens

    alone = [cached(salt) for salt in ("mine", None, "yours", "mine ")]
    again = [cached(salt) for salt in ("mine", None, "yours", "mine ", "")]
    assert max(alone) < 64  # the start of the template is shorter than a page
    assert min(again) > 64


def test_no_tokens_read_the_prompt_into_the_prefix_cache(unix_client: OpenAI) -> None:
    messages = [{"role": "system", "content": "Hurry slowly. " * 60}, {"role": "user", "content": "Begin."}]
    constraint = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    empty = create(unix_client, messages=messages, max_tokens=0, n=2, logprobs=True, response_format=constraint)
    assert [choice.message.content for choice in empty.choices] == ["", ""]
    assert {choice.finish_reason for choice in empty.choices} == {"length"}
    assert empty.usage.completion_tokens == 0
    answer = create(unix_client, messages=messages)
    assert answer.usage.prompt_tokens == empty.usage.prompt_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens > 0.9 * answer.usage.prompt_tokens


def test_a_stream_of_no_tokens_has_a_role_and_a_reason(unix_client: OpenAI) -> None:
    *chunks, last = create(unix_client, max_completion_tokens=0, max_tokens=None, stream=True, stream_options={"include_usage": True})
    choices = [chunk.choices[0] for chunk in chunks]
    assert [(choice.delta.role, choice.delta.content, choice.finish_reason) for choice in choices] == [
        ("assistant", "", None),
        (None, None, "length"),
    ]
    assert last.usage.completion_tokens == 0
