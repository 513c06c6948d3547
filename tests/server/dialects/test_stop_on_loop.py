"""`stop_on_loop`: a field of OpenAI's API beyond the original, with vLLM's `stop_reason`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.processes.optional import needs

if TYPE_CHECKING:
    from openai import OpenAI

needs("openai")

LOOP: dict[str, Any] = {"model": "tiny", "max_tokens": 150, "temperature": 0, "logit_bias": {"40": 100}}
ON: dict[str, Any] = {"stop_on_loop": True}


def test_a_chat(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Hello"}]
    whole = client.chat.completions.create(messages=messages, **LOOP)
    assert whole.usage
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 150)
    assert "stop_reason" not in (whole.choices[0].model_extra or {})
    ended = client.chat.completions.create(messages=messages, **LOOP, extra_body=ON)
    assert ended.usage
    assert (ended.choices[0].finish_reason, ended.usage.completion_tokens) == ("length", 100)
    assert ended.choices[0].model_extra == {"stop_reason": "loop"}
    chunks: Any = client.chat.completions.create(messages=messages, **LOOP, extra_body=ON, stream=True)
    ends = [choice for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert [(end.finish_reason, end.model_extra) for end in ends] == [("length", {"stop_reason": "loop"})]


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion(client: OpenAI, stream: bool) -> None:
    answer: Any = client.completions.create(prompt="Hello", **LOOP, extra_body=ON, stream=stream)
    parts = [*answer] if stream else [answer]
    assert [choice.finish_reason for part in parts for choice in part.choices if choice.finish_reason] == ["length"]
    assert "".join(choice.text for part in parts for choice in part.choices)


def test_a_response(client: OpenAI) -> None:
    bias: Any = {**ON, "logit_bias": LOOP["logit_bias"]}
    answer = client.responses.create(model="tiny", input="Hello", temperature=0, max_output_tokens=150, extra_body=bias)
    assert answer.usage
    assert (answer.status, answer.usage.output_tokens) == ("incomplete", 100)
