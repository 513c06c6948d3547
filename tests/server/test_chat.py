"""OpenAI's own client against a live server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI
from support.live_server import LiveServer

MESSAGES: Any = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]


@pytest.fixture(params=["unix", "tcp"])
def client(request: pytest.FixtureRequest, live: LiveServer) -> Iterator[OpenAI]:
    transport = httpx2.HTTPTransport(uds=str(live.path)) if request.param == "unix" else httpx2.HTTPTransport()
    with OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0, http_client=httpx2.Client(transport=transport)) as client:
        yield client


def create(client: OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 12, **more})


def test_an_answer(client: OpenAI) -> None:
    answer = create(client)
    (choice,) = answer.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert answer.model == "tiny"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert choice.message.content
    assert choice.logprobs is None


def test_a_stream_has_the_same_text_one_role_one_reason_and_no_usage(client: OpenAI) -> None:
    chunks = list(create(client, stream=True))
    choices = [chunk.choices[0] for chunk in chunks]
    assert "".join(choice.delta.content or "" for choice in choices) == create(client).choices[0].message.content
    assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert choices[-1].delta.content is None
    assert {chunk.usage for chunk in chunks} == {None}
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


def test_a_model_that_is_not_served(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as found:
        create(client, model="/etc/passwd")
    assert found.value.code == "model_not_found"
