"""The responses API: OpenAI's own client against a live server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.processes.optional import needs

if TYPE_CHECKING:
    from openai import OpenAI

openai = needs("openai")


def create(client: OpenAI, **more: Any) -> Any:
    return client.responses.create(**{"model": "tiny", "input": "Hello", "temperature": 0, "max_output_tokens": 10, **more})


def test_a_response(client: OpenAI) -> None:
    response = create(client, instructions="Be short.")
    (item,) = response.output
    assert (response.status, response.incomplete_details.reason, item.status) == ("incomplete", "max_output_tokens", "incomplete")
    assert len(response.output_text) == response.usage.output_tokens == 10
    assert response.store is False
    messages: Any = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]
    chat = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=10)
    assert chat.choices[0].message.content == response.output_text


def test_events_are_typed_numbered_and_in_order(client: OpenAI) -> None:
    events = list(create(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    begin = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    end = ["response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete"]
    assert kinds == [*begin, *["response.output_text.delta"] * len(deltas), *end]
    whole = create(client)
    assert "".join(event.delta for event in deltas) == events[-4].text == events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == 10
    assert len({event.response.id for event in events if hasattr(event, "response")}) == 1
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1


def test_the_clients_own_accumulator(unix_client: OpenAI) -> None:
    with unix_client.responses.stream(model="tiny", input="Hello", temperature=0, max_output_tokens=10) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == create(unix_client).output_text


def test_a_stop_is_a_complete_response(unix_client: OpenAI) -> None:
    text = create(unix_client).output_text
    response = create(unix_client, extra_body={"stop": text[5]})
    assert (response.status, response.incomplete_details, response.output_text) == ("completed", None, text[: text.index(text[5])])
    assert list(create(unix_client, stream=True, extra_body={"stop": text[5]}))[-1].type == "response.completed"


def test_an_answer_can_be_sent_back_as_it_came(unix_client: OpenAI) -> None:
    first = create(unix_client, include=["message.output_text.logprobs"], top_logprobs=2)
    assert len(first.output[0].content[0].logprobs) == 10
    conversation: Any = [{"role": "user", "content": "Hello"}, *(item.model_dump(exclude_none=True) for item in first.output)]
    parts = [{"type": "input_text", "text": "And?"}]
    again = create(unix_client, input=[*conversation, {"type": "message", "role": "user", "content": parts}])
    messages: Any = [("user", "Hello"), ("assistant", first.output_text), ("user", "And?")]
    messages = [{"role": role, "content": content} for role, content in messages]
    chat = unix_client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=10)
    assert chat.choices[0].message.content == again.output_text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"reasoning": {"effort": "very high"}}, "reasoning.effort"),
        ({"truncation": "never"}, "truncation"),
        ({"include": ["file_search_call"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "computer_call_output", "role": "user", "content": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]}, "input[0].content[0].file_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": "x"}, {"type": "item_reference", "id": "msg_1"}]}, "input[1].id"),
        ({"input": [{"id": "msg_1"}]}, "input[0].id"),
        ({"n": 2}, "n"),
        ({"odd": 2}, "odd"),
    ],
)
def test_what_is_refused(unix_client: OpenAI, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as found:
            unix_client.responses.create(model="tiny", input="Hello", stream=stream, extra_body=fields)
        assert found.value.param == param


def test_references_to_items_are_refused_by_name(unix_client: OpenAI) -> None:
    for reference in ({"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}, {"type": None, "id": "msg_1"}):
        with pytest.raises(
            openai.BadRequestError, match="item_reference names an item by its id, and responses are not kept: send the item"
        ):
            unix_client.responses.create(model="tiny", input=[], extra_body={"input": [reference]})


def test_nothing_is_stored(unix_client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        unix_client.responses.retrieve(create(unix_client).id)
