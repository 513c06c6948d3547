"""AnyLanguageModel, a Swift package: requests recorded from version 0.8.0 of its OpenAI provider (both APIs) and of its Open Responses
provider, sent to a live server. Each answer is read as the provider reads it: a field that the provider decodes must have its type."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.http.live_server import LiveServer, live_server
from support.models.tiny_directory import JSON_CHARACTERS, tiny_directory

from mlxinfer.engine.async_llm import AsyncLLM

REQUESTS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("any_language_model.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path = tiny_directory(tmp_path_factory.mktemp("models") / "tiny", characters=JSON_CHARACTERS, context=8192)
    with live_server({"tiny": lambda: AsyncLLM(path)}) as server:
        yield server


def _sent(live: LiveServer, path: str, request: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    body = json.dumps(request).encode()
    accept = "text/event-stream" if request["stream"] else "application/json"
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer none\r\nAccept: {accept}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return live.exchange(head.encode() + body)


def _chat_text(answer: dict[str, Any]) -> str:
    message = answer["choices"][0]["message"]
    assert isinstance(answer["id"], str)
    assert isinstance(message["role"], str)
    assert message["refusal"] is None
    for call in message.get("tool_calls", ()):
        assert {type(call["id"]), type(call["function"]["name"]), type(call["function"]["arguments"])} == {str}
    return message["content"] or ""


def _response_text(answer: dict[str, Any]) -> str:
    assert isinstance(answer["id"], str)
    assert answer["error"] is None
    assert isinstance(answer.get("output_text", ""), str)
    messages = [item for item in answer["output"] if item["type"] == "message"]
    return "".join(part["text"] for item in messages for part in item["content"] if part["type"] == "output_text")


def _chat_pieces(events: list[dict[str, Any]]) -> str:
    assert all(isinstance(event["id"], str) for event in events)
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert [choice["finish_reason"] for choice in choices][-1] is not None
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def _response_pieces(events: list[dict[str, Any]]) -> str:
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    assert "response.failed" not in {event["type"] for event in events}
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


@pytest.mark.parametrize("golden", REQUESTS, ids=lambda golden: golden["name"].replace("/", "-").replace(" ", "-"))
def test_a_provider_can_read_the_answer(live: LiveServer, golden: dict[str, Any]) -> None:
    request, is_chat = golden["request"], golden["path"].endswith("completions")
    status, headers, body = _sent(live, golden["path"], request)
    assert status == golden["status"], body
    if status != 200:
        assert json.loads(body)["error"]["message"]
        return
    if request["stream"]:
        assert headers["content-type"].startswith("text/event-stream")
        data = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ") and line != "data: [DONE]"]
        text = (_chat_pieces if is_chat else _response_pieces)([json.loads(line) for line in data])
    else:
        text = (_chat_text if is_chat else _response_text)(json.loads(body))
    if "response_format" in request or "text" in request:
        assert text.lstrip().startswith("{")


def test_pictures_and_nested_types_are_what_is_refused() -> None:
    """The providers leave out the definitions that their schemas of nested types refer to."""
    refused = [golden for golden in REQUESTS if golden["status"] != 200]
    assert {golden["name"].partition("/")[2] for golden in refused} == {"nested", "picture"}
    nested = [json.dumps(golden["request"]) for golden in refused if golden["name"].endswith("nested")]
    assert all("#/$defs/" in request and '"$defs"' not in request for request in nested)


def test_a_call_inside_of_a_message_is_a_call(live: LiveServer) -> None:
    """The Open Responses provider sends the calls of earlier turns inside of a message. As items of their own they give the same prompt."""
    (golden,) = [golden for golden in REQUESTS if golden["name"] == "open-responses/afterTool"]
    request = golden["request"]
    (message,) = [item for item in request["input"] if item.get("role") == "assistant"]
    (call,) = message["content"]
    flat = {**request, "input": [call if item is message else item for item in request["input"]]}
    said = {**message, "content": [{"type": "output_text", "text": "Hm"}, call]}
    both = {**request, "input": [said if item is message else item for item in request["input"]]}
    counts = [json.loads(_sent(live, golden["path"], body)[2])["usage"]["input_tokens"] for body in (request, flat, both)]
    assert counts[0] == counts[1] < counts[2]
