"""Messages: Anthropic's own client against a live server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import TypeAdapter
from support.http.live_server import LiveServer, live_server
from support.processes.optional import needs

from mlxinfer.engine.async_llm import AsyncLLM
from mlxinfer.errors import EngineError, QueueFullError
from mlxinfer.server.anthropic.blocks import ToolUseBlock
from mlxinfer.server.anthropic.messages import MessageObject, TokenCount
from mlxinfer.server.anthropic.protocol import error_response
from mlxinfer.server.errors import APIError, from_engine_error, timed_out

if TYPE_CHECKING:
    from anthropic import Anthropic

anthropic = needs("anthropic")
httpx2 = needs("httpx2")

MESSAGES: Any = [{"role": "user", "content": "Hello"}]


def connected(live: LiveServer, *, unix: bool, key: str = "unused") -> Anthropic:
    transport = httpx2.HTTPTransport(uds=str(live.path), verify=False) if unix else httpx2.HTTPTransport(verify=False)
    return anthropic.Anthropic(base_url=live.url, api_key=key, max_retries=0, http_client=httpx2.Client(transport=transport, timeout=60))


@pytest.fixture(params=["unix", "tcp"])
def claude(request: pytest.FixtureRequest, live: LiveServer) -> Iterator[Anthropic]:
    with connected(live, unix=request.param == "unix") as client:
        yield client


@pytest.fixture
def unix_claude(live: LiveServer) -> Iterator[Anthropic]:
    with connected(live, unix=True) as client:
        yield client


def create(client: Anthropic, **more: Any) -> Any:
    body = {"temperature": 0, **more.pop("extra_body", {})}
    return client.messages.create(
        **{"model": "tiny", "messages": MESSAGES, "system": "Be short.", "max_tokens": 12, "extra_body": body, **more}
    )


def text_of(events: list[Any]) -> str:
    return "".join(event.delta.text for event in events if event.type == "content_block_delta")


def test_an_answer(claude: Anthropic) -> None:
    message = create(claude)
    (block,) = message.content
    assert (message.type, message.role, message.model, block.type) == ("message", "assistant", "tiny", "text")
    assert message.id.startswith("msg_")
    assert len(block.text) == 12
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message.usage.output_tokens == 12
    assert len(message._request_id) == 32


def test_a_stream_has_the_same_text_and_its_events_in_order(claude: Anthropic) -> None:
    events = list(create(claude, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    whole = create(claude)
    assert text_of(events) == whole.content[0].text
    start, last = events[0].message, events[-2]
    assert (start.content, start.stop_reason, start.usage.input_tokens, start.usage.output_tokens) == (
        [],
        None,
        whole.usage.input_tokens,
        0,
    )
    assert (last.delta.stop_reason, last.delta.stop_sequence, last.usage.output_tokens) == ("max_tokens", None, 12)


def test_the_clients_own_accumulator(claude: Anthropic) -> None:
    with claude.messages.stream(
        model="tiny", messages=MESSAGES, system="Be short.", max_tokens=12, extra_body={"temperature": 0}
    ) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    whole = create(claude)
    assert text == message.content[0].text == whole.content[0].text
    assert (message.stop_reason, message.usage) == (whole.stop_reason, whole.usage)


def test_stop_sequences_and_which_of_them(claude: Anthropic) -> None:
    text = create(claude).content[0].text
    stop = text[4:7]
    expected = text[: text.index(stop)]
    message = create(claude, stop_sequences=["never", stop])
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == (expected, "stop_sequence", stop)
    events = list(create(claude, stop_sequences=["never", stop], stream=True))
    assert text_of(events) == expected
    assert (events[-2].delta.stop_reason, events[-2].delta.stop_sequence) == ("stop_sequence", stop)


def test_an_answer_may_be_empty(unix_claude: Anthropic) -> None:
    first = create(unix_claude).content[0].text[0]
    message = create(unix_claude, stop_sequences=[first])
    assert [block.text for block in message.content] == [""]
    kinds = [event.type for event in create(unix_claude, stop_sequences=[first], stream=True)]
    assert kinds == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]


def test_the_end_of_the_context(unix_claude: Anthropic) -> None:
    message = create(unix_claude, messages=[{"role": "user", "content": "x" * 4000}], max_tokens=32000)
    assert message.stop_reason == "model_context_window_exceeded"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": None},
        {"system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "short.", "cache_control": {"type": "ephemeral"}}]},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": [{"type": "text", "text": "More"}]}]},
    ],
    ids=["text", "bare", "blocks", "turns"],
)
def test_count_tokens(claude: Anthropic, fields: Any) -> None:
    asked = {name: value for name, value in {"messages": MESSAGES, "system": "Be short.", **fields}.items() if value is not None}
    usage = claude.messages.create(model="tiny", max_tokens=1, **asked).usage
    counted = claude.messages.count_tokens(model="tiny", **asked)
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    assert "cache_control" in str(asked) or counted.input_tokens == usage.input_tokens


def test_blocks_are_what_their_text_is(unix_claude: Anthropic) -> None:
    blocks = [{"role": "user", "content": [{"type": "text", "text": text} for text in ("Hel", "lo")]}]
    system = [{"type": "text", "text": "Be "}, {"type": "text", "text": "short."}]
    assert create(unix_claude, messages=blocks, system=system).content == create(unix_claude).content


def test_turns_of_the_same_role_are_one(unix_claude: Anthropic) -> None:
    apart = [{"role": "user", "content": "One"}, {"role": "user", "content": "Two"}]
    together = [{"role": "user", "content": "One\n\nTwo"}]
    assert create(unix_claude, messages=apart).usage.input_tokens == create(unix_claude, messages=together).usage.input_tokens


def test_cached_tokens_are_told_apart_where_caching_is_asked_for(unix_claude: Anthropic) -> None:
    marked = {"type": "text", "text": "A long beginning. " * 20, "cache_control": {"type": "ephemeral"}}
    plain = {"type": "text", "text": marked["text"]}
    create(unix_claude, system=[plain])
    counted = unix_claude.messages.count_tokens(model="tiny", messages=MESSAGES, system=[plain]).input_tokens
    assert create(unix_claude, system=[plain]).usage.input_tokens == counted
    usage = create(unix_claude, system=[marked]).usage
    assert usage.cache_read_input_tokens > 0
    assert usage.input_tokens + usage.cache_read_input_tokens == counted


CLAUDE_CODE: Any = {
    "metadata": {"user_id": "user_" + "a" * 64 + "_account__session_" + "b" * 300},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "tools": [],
}


def test_what_claude_code_sends_with_every_request(unix_claude: Anthropic) -> None:
    thought = [
        {"type": "thinking", "thinking": "Well", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Hi"},
    ]
    messages = [*MESSAGES, {"role": "assistant", "content": thought}, *MESSAGES]
    settings = {"extra_query": {"beta": "true"}, "extra_headers": {"anthropic-beta": "claude-code-20250219"}, "extra_body": CLAUDE_CODE}
    assert create(unix_claude, messages=messages, **settings).content


def test_closing_a_stream_stops_the_engine(claude: Anthropic, live: LiveServer) -> None:
    before = live.stats().completion_tokens
    with create(claude, max_tokens=3000, stream=True) as stream:
        for _ in range(4):
            next(stream)
    stats = live.until(lambda s: s.running == s.waiting == 0)
    assert stats.pages_used == 0
    assert stats.completion_tokens - before < 3000


def test_a_request_that_is_given_up_stops_the_engine(live: LiveServer) -> None:
    with connected(live, unix=True) as client, pytest.raises(anthropic.APITimeoutError):
        create(client, max_tokens=3000, timeout=0.2)
    assert live.until(lambda s: s.running == s.waiting == 0).pages_used == 0


def refused(client: Anthropic, kind: str = "BadRequestError", **fields: Any) -> tuple[str, str]:
    """The type and the message of the exception of `create`; the same for a stream."""
    raised = []
    for stream in (False, True):
        with pytest.raises(getattr(anthropic, kind)) as found:
            client.messages.create(model="tiny", messages=MESSAGES, max_tokens=3, stream=stream, extra_body=fields)
        raised.append(found.value.body)
    assert raised[0] == raised[1]
    body: Any = raised[0]
    assert (set(body), body["type"], set(body["error"])) == ({"type", "error"}, "error", {"type", "message"})
    return body["error"]["type"], body["error"]["message"]


TOOL = {"name": "f", "input_schema": {"type": "object"}}
USED = {"type": "tool_use", "id": "x", "name": "f", "input": {}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{**TOOL, "type": "web_search_20250305"}]}, "tools[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"output_config": {"format": {"type": "grammar"}}}, "output_config.format.type"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"container": "x"}, "container"),
        ({"speed": "fast"}, "speed"),
    ],
)
def test_what_is_known_but_not_supported_is_refused_by_name(unix_claude: Anthropic, fields: dict[str, Any], param: str) -> None:
    kind, message = refused(unix_claude, **fields)
    assert kind == "invalid_request_error"
    assert message.startswith(f"{param}: ")
    assert "not supported yet" in message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": "1"}, "top_p"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [USED]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"tools": [TOOL, TOOL]}, "tools[1]"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": "I"}]}, "messages[1]"),
        ({"metadata": {"name": "x"}}, "metadata.name"),
        ({"system": 3}, "system"),
        ({"seed": 2**70}, "seed"),
    ],
)
def test_what_is_wrong_is_named(unix_claude: Anthropic, fields: dict[str, Any], param: str) -> None:
    kind, message = refused(unix_claude, **fields)
    assert kind == "invalid_request_error"
    assert param in message.replace(":", " ").split()


def test_max_tokens_is_needed(unix_claude: Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="Missing required field: max_tokens"):
        unix_claude.post("/v1/messages", body={"model": "tiny", "messages": MESSAGES}, cast_to=object)


def test_a_model_that_is_not_there(unix_claude: Anthropic) -> None:
    kind, message = refused(unix_claude, "NotFoundError", model="claude-none")
    assert (kind, "claude-none" in message) == ("not_found_error", True)
    with pytest.raises(anthropic.NotFoundError):
        unix_claude.messages.count_tokens(model="claude-none", messages=MESSAGES)


def test_a_prompt_beyond_the_context(unix_claude: Anthropic) -> None:
    kind, message = refused(unix_claude, messages=[{"role": "user", "content": "x" * 5000}])
    assert kind == "invalid_request_error"
    assert re.fullmatch(r"prompt is too long: \d+ tokens > 4095 maximum", message)


def test_the_key_is_asked_for_on_tcp(tiny_path: Path) -> None:
    key = "a-key-of-some-length"
    with live_server({"tiny": lambda: AsyncLLM(tiny_path)}, api_key=key) as strict:
        with connected(strict, unix=False) as client, pytest.raises(anthropic.AuthenticationError) as found:
            create(client)
        assert found.value.body == {"type": "error", "error": {"type": "authentication_error", "message": "Incorrect API key provided."}}
        with connected(strict, unix=False, key=key) as client:
            assert create(client).content
        body = {"model": "tiny", "max_tokens": 3, "messages": MESSAGES}
        with httpx2.Client(base_url=strict.url, verify=False) as client:
            assert client.post("/v1/messages", json=body, headers={"x-api-key": key}).status_code == 200
            assert client.post("/api/chat", json={"model": "tiny"}).json() == {
                "error": "An API key is needed: send it as Authorization: Bearer."
            }


@pytest.mark.parametrize("version", ["2023-06-01", "2026-10-21", None])
def test_both_versions_and_none(live: LiveServer, version: str | None) -> None:
    body = {"model": "tiny", "max_tokens": 3, "temperature": 0.5, "messages": MESSAGES}
    with httpx2.Client(base_url=live.url, verify=False) as client:
        answer = client.post("/v1/messages", json=body, headers={} if version is None else {"anthropic-version": version})
    assert answer.json()["usage"]["output_tokens"] == 3


def test_another_version_of_the_api(unix_claude: Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="anthropic-version"):
        create(unix_claude, extra_headers={"anthropic-version": "2023-01-01"})
    with pytest.raises(anthropic.BadRequestError, match="anthropic-version"):
        unix_claude.messages.count_tokens(model="tiny", messages=MESSAGES, extra_headers={"anthropic-version": "2023-01-01"})


@pytest.mark.parametrize(
    ("problem", "status", "kind"),
    [
        (APIError(401, "authentication", "x"), 401, "authentication_error"),
        (APIError(403, "permission", "x"), 403, "permission_error"),
        (APIError(413, "too_large", "x"), 413, "request_too_large"),
        (from_engine_error(QueueFullError("x")), 429, "rate_limit_error"),
        (timed_out(), 408, "timeout_error"),
        (from_engine_error(EngineError("x")), 529, "overloaded_error"),
        (APIError(500, "internal", "x"), 500, "api_error"),
    ],
)
def test_every_problem_has_anthropics_type(problem: APIError, status: int, kind: str) -> None:
    response = error_response(problem)
    assert (response.status_code, json.loads(response.body)["error"]["type"]) == (status, kind)


def test_answers_are_as_the_document_says(unix_claude: Anthropic) -> None:
    body = {"model": "tiny", "messages": MESSAGES}
    whole: Any = unix_claude.post("/v1/messages", body={**body, "max_tokens": 2}, cast_to=object)
    assert TypeAdapter(MessageObject).validate_python(whole) == whole
    counted: Any = unix_claude.post("/v1/messages/count_tokens", body=body, cast_to=object)
    assert TypeAdapter(TokenCount).validate_python(counted) == counted


@pytest.mark.long
def test_litellm(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = needs("litellm")
    litellm.telemetry = False

    asked: dict[str, Any] = {"model": "anthropic/tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 4}
    asked |= {"api_base": live.url, "api_key": "unused"}
    whole = litellm.completion(**asked).choices[0]
    streamed = [chunk.choices[0].delta.content for chunk in litellm.completion(**asked, stream=True)]
    assert "".join(filter(None, streamed)) == whole.message.content
    assert whole.finish_reason == "length"


def test_counting_takes_only_a_conversation(unix_claude: Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="Unknown field: max_tokens"):
        unix_claude.messages.count_tokens(model="tiny", messages=MESSAGES, extra_body={"max_tokens": 3})


def test_a_call_comes_back_as_the_client_holds_it() -> None:
    """Clients send all fields of the library's class back, with null for fields that the answer did not have."""
    types = pytest.importorskip("anthropic.types", reason="anthropic is not installed (make test installs it)")
    call = types.ToolUseBlock(id="toolu_1", name="f", input={"x": 1}, type="tool_use")
    assert ToolUseBlock.model_validate(call.model_dump()).input == {"x": 1}
