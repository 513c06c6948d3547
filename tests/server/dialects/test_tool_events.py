"""Reasoning and calls in the events of each dialect, from chunks in the engine's form."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from mlxinfer.server.anthropic.messages import SIGNATURE, MessageAnswer
from mlxinfer.server.ollama.answers import Lines, as_message
from mlxinfer.server.openai.chat_answers import AnswerForm, ChatEvents
from mlxinfer.server.openai.response_answers import ResponseEvents
from mlxinfer.types import Chunk, Completion, SamplingParams, ToolCall, ToolCallDelta, Usage

USAGE = Usage(7, 5)
CALLS = (ToolCall("call_0a", "weather", '{"city": "Rome"}'), ToolCall("call_0b", "time", "{}"))
CHUNKS = [
    Chunk("", reasoning="Let me"),
    Chunk("", reasoning=" see."),
    Chunk(""),
    Chunk("I'll"),
    Chunk(" look.", tool_calls=(ToolCallDelta(0, "", "call_0a", "weather"), ToolCallDelta(0, '{"ci'))),
    Chunk("", tool_calls=(ToolCallDelta(0, 'ty": "Rome"}'), ToolCallDelta(1, "", "call_0b", "time"), ToolCallDelta(1, "{}"))),
    Chunk("", finish_reason="stop", usage=USAGE),
]
WHOLE = Completion("I'll look.", [1], "stop", USAGE, reasoning="Let me see.", tool_calls=CALLS)
BROKEN = [
    Chunk("", tool_calls=(ToolCallDelta(0, '{"city": "Ro', "call_0a", "weather"),)),
    Chunk("", finish_reason="length", usage=USAGE),
]
BROKEN_WHOLE = Completion("", [1], "length", USAGE, tool_calls=(ToolCall("call_0a", "weather", '{"city": "Ro'),))
SERVED: Any = SimpleNamespace(name="tiny", llm=SimpleNamespace(tokenizer=None))
REQUEST: Any = SimpleNamespace(served=SERVED, token_ids=[0] * 7, params=SamplingParams(max_tokens=5))


def events(raw: bytes) -> list[Any]:
    parts = [part.rpartition("data: ")[2] for part in raw.decode().strip().split("\n\n")]
    return [json.loads(part) for part in parts if part != "[DONE]"]


def each(chunks: list[Chunk]) -> list[list[Chunk]]:
    """Render chunks one by one."""
    return [[chunk] for chunk in chunks]


# --- chat completions


def chat(chunks: list[Chunk], **form: Any) -> tuple[list[Any], str]:
    rendered = ChatEvents(AnswerForm(SERVED, **form), wants_usage=False)
    found = [event["choices"][0] for event in events(b"".join(map(rendered.render, each(chunks))) + rendered.end())]
    return [choice["delta"] for choice in found], found[-1]["finish_reason"]


def test_chat_deltas() -> None:
    (first, *deltas, last), reason = chat(CHUNKS)
    assert first == {"role": "assistant", "content": "", "refusal": None}
    assert (last, reason) == ({}, "tool_calls")
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Let me see."
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    assert "".join(delta.get("content", "") for delta in deltas) == "I'll look."
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    for number, call in enumerate(CALLS):
        head, *rest = [piece for piece in pieces if piece["index"] == number]
        assert (head["id"], head["type"], head["function"]["name"]) == (call.id, "function", call.name)
        assert all(set(piece) == {"index", "function"} and set(piece["function"]) == {"arguments"} for piece in rest)
        assert all(piece["function"]["arguments"] for piece in rest)
        assert "".join(piece["function"]["arguments"] for piece in [head, *rest]) == call.arguments
    assert all(len({piece["index"] for piece in delta.get("tool_calls", ())}) == len(delta.get("tool_calls", ())) for delta in deltas)


def test_a_whole_chat_answer() -> None:
    (choice,) = AnswerForm(SERVED).whole([WHOLE])["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": "I'll look.",
        "refusal": None,
        "reasoning": "Let me see.",
        "reasoning_content": "Let me see.",
        "tool_calls": [{"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in CALLS],
    }


def test_content_is_null_where_there_are_calls_only() -> None:
    answer = Completion("", [1], "stop", USAGE, tool_calls=CALLS)
    (choice,) = AnswerForm(SERVED).whole([answer])["choices"]
    assert choice["message"]["content"] is None


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("both", {"reasoning", "reasoning_content"}),
        ("reasoning", {"reasoning"}),
        ("reasoning_content", {"reasoning_content"}),
        ("none", set()),
    ],
)
def test_reasoning_is_in_the_fields_that_were_asked_for(field: Any, names: set[str]) -> None:
    deltas, _ = chat(CHUNKS, reasoning_field=field)
    assert {name for delta in deltas for name in delta if name.startswith("reasoning")} == names
    (choice,) = AnswerForm(SERVED, field).whole([WHOLE])["choices"]
    assert {name for name in choice["message"] if name.startswith("reasoning")} == names


def test_the_older_form() -> None:
    deltas, reason = chat(CHUNKS[3:5] + CHUNKS[6:], older_form=True)
    found = [delta["function_call"] for delta in deltas if "function_call" in delta]
    assert (found, reason) == ([{"name": "weather", "arguments": '{"ci'}], "function_call")
    (choice,) = AnswerForm(SERVED, older_form=True).whole([WHOLE])["choices"]
    assert choice["message"]["function_call"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "function_call"


def test_a_call_that_broke_off_is_delivered_as_it_is() -> None:
    deltas, reason = chat(BROKEN)
    assert reason == "length"
    assert "".join(piece["function"]["arguments"] for delta in deltas for piece in delta.get("tool_calls", ())) == '{"city": "Ro'
    (choice,) = AnswerForm(SERVED).whole([BROKEN_WHOLE])["choices"]
    assert (choice["finish_reason"], choice["message"]["tool_calls"][0]["function"]["arguments"]) == ("length", '{"city": "Ro')


# --- responses


def responses(chunks: list[Chunk], **settings: Any) -> list[Any]:
    rendered = ResponseEvents(SERVED.llm.tokenizer, lambda status, items, usage: {"status": status, "output": list(items)}, **settings)
    return events(rendered.begin() + b"".join(map(rendered.render, each(chunks))) + rendered.end())


@pytest.mark.parametrize("sums_up", [False, True])
def test_response_items(sums_up: bool) -> None:
    found = responses(CHUNKS, sums_up=sums_up)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    added = [event for event in found if event["type"] == "response.output_item.added"]
    done = [event for event in found if event["type"] == "response.output_item.done"]
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [event["item"]["type"] for event in added] == [event["item"]["type"] for event in done] == kinds
    assert [event["output_index"] for event in added] == [event["output_index"] for event in done] == [0, 1, 2, 3]
    assert [event["item"]["id"] for event in added] == [event["item"]["id"] for event in done]
    last = found[-1]
    assert last["type"] == "response.completed"
    assert last["response"]["output"] == [event["item"] for event in done]
    reasoning, message, first, second = last["response"]["output"]
    thought = [{"type": "summary_text" if sums_up else "reasoning_text", "text": "Let me see."}]
    assert (reasoning["summary"], reasoning["content"]) == ((thought, []) if sums_up else ([], thought))
    assert message["content"][0]["text"] == "I'll look."
    assert [(call["call_id"], call["name"], call["arguments"]) for call in (first, second)] == [(c.id, c.name, c.arguments) for c in CALLS]
    assert all(item["status"] == "completed" for item in last["response"]["output"])
    name = "reasoning_summary_text" if sums_up else "reasoning_text"
    assert "".join(event["delta"] for event in found if event["type"] == f"response.{name}.delta") == "Let me see."
    for index, call in ((2, CALLS[0]), (3, CALLS[1])):
        pieces = [
            event for event in found if event["type"].startswith("response.function_call_arguments") and event["output_index"] == index
        ]
        assert "".join(event["delta"] for event in pieces[:-1]) == pieces[-1]["arguments"] == call.arguments
        assert pieces[-1]["type"].endswith(".done")


def test_a_whole_response_has_the_items_of_the_stream() -> None:
    def plain(items: list[Any]) -> list[Any]:
        return [{name: value for name, value in item.items() if name != "id"} for item in items]

    rendered = ResponseEvents(SERVED.llm.tokenizer, lambda status, items, usage: {"status": status, "output": items}, sums_up=False)
    whole = rendered.whole(WHOLE)
    assert whole["status"] == "completed"
    assert plain(whole["output"]) == plain(responses(CHUNKS, sums_up=False)[-1]["response"]["output"])


def test_a_response_that_breaks_off_in_a_call() -> None:
    last = responses(BROKEN, sums_up=False)[-1]
    assert last["type"] == "response.incomplete"
    (call,) = last["response"]["output"]
    assert (call["status"], call["arguments"]) == ("incomplete", '{"city": "Ro')


def test_an_empty_response_has_a_message() -> None:
    (message,) = responses([Chunk("", finish_reason="stop", usage=USAGE)], sums_up=False)[-1]["response"]["output"]
    assert message["content"][0]["text"] == ""


# --- messages


def messages(chunks: list[Chunk], **settings: Any) -> list[Any]:
    answer = MessageAnswer(REQUEST, **{"reports_cached": False, "omits_thinking": False, **settings})
    return events(answer.begin() + b"".join(map(answer.render, each(chunks))))


def blocks(found: list[Any]) -> list[Any]:
    """The blocks, assembled as a client does."""
    built: list[Any] = []
    for event in found:
        if event["type"] == "content_block_start":
            assert event["index"] == len(built)
            built.append({**event["content_block"], "json": "", "open": True})
        elif event["type"] == "content_block_delta":
            block, delta = built[event["index"]], event["delta"]
            assert block["open"]
            assert event["index"] == len(built) - 1
            field, value = next((name, value) for name, value in delta.items() if name != "type")
            block["json" if field == "partial_json" else field] += value
        elif event["type"] == "content_block_stop":
            built[event["index"]]["open"] = False
    assert not any(block.pop("open") for block in built)
    for block in built:
        raw = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(raw or "{}")
    return built


def test_message_blocks() -> None:
    found = messages(CHUNKS)
    assert (
        blocks(found)
        == MessageAnswer(REQUEST, reports_cached=False, omits_thinking=False).whole(WHOLE)["content"]
        == [
            {"type": "thinking", "thinking": "Let me see.", "signature": SIGNATURE},
            {"type": "text", "text": "I'll look."},
            {"type": "tool_use", "id": "toolu_0a", "name": "weather", "input": {"city": "Rome"}},
            {"type": "tool_use", "id": "toolu_0b", "name": "time", "input": {}},
        ]
    )
    assert [event["type"] for event in found][-2:] == ["message_delta", "message_stop"]
    assert found[-2]["delta"]["stop_reason"] == "tool_use"


def test_omitted_thinking() -> None:
    settings = {"omits_thinking": True}
    thinking = {"type": "thinking", "thinking": "", "signature": SIGNATURE}
    assert blocks(messages(CHUNKS, **settings))[0] == thinking
    assert MessageAnswer(REQUEST, reports_cached=False, omits_thinking=True).whole(WHOLE)["content"][0] == thinking


def test_a_call_that_broke_off_has_no_input_and_loses_nothing() -> None:
    whole = MessageAnswer(REQUEST, reports_cached=False, omits_thinking=False).whole(BROKEN_WHOLE)
    assert whole["content"] == [{"type": "text", "text": 'weather({"city": "Ro'}]
    assert whole["stop_reason"] == "max_tokens"
    deltas = [event["delta"] for event in messages(BROKEN) if event["type"] == "content_block_delta"]
    assert deltas == [{"type": "input_json_delta", "partial_json": '{"city": "Ro'}]


def test_an_empty_message_has_a_text() -> None:
    assert blocks(messages([Chunk("", finish_reason="stop", usage=USAGE)])) == [{"type": "text", "text": ""}]


# --- Ollama


def lines(chunks: list[Chunk]) -> list[Any]:
    body: Any = SimpleNamespace(model="tiny")
    made = Lines(SimpleNamespace(log={}), body, REQUEST, as_message)  # type: ignore[arg-type]
    return [json.loads(line) for part in map(made.render, each(chunks)) for line in part.decode().splitlines()]


def test_ollama_lines() -> None:
    found = lines(CHUNKS)
    parts = [line["message"] for line in found]
    assert "".join(part.get("thinking", "") for part in parts) == "Let me see."
    assert "".join(part["content"] for part in parts) == "I'll look."
    calls = [call for part in parts for call in part.get("tool_calls", ())]
    assert calls == [
        {"id": "call_0a", "function": {"index": 0, "name": "weather", "arguments": {"city": "Rome"}}},
        {"id": "call_0b", "function": {"index": 1, "name": "time", "arguments": {}}},
    ]
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    assert found[-1]["done_reason"] == "stop"


def test_a_call_that_broke_off_is_text_for_ollama() -> None:
    assert "".join(line["message"]["content"] for line in lines(BROKEN)) == 'weather({"city": "Ro'
