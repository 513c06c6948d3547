"""Refused requests, as exceptions of OpenAI's client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.processes.optional import needs

from mlxinfer.server.errors import timed_out

if TYPE_CHECKING:
    from openai import OpenAI

openai = needs("openai")

MESSAGES: Any = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def refused(client: OpenAI, kind: str = "BadRequestError", **fields: Any) -> Any:
    """The exception of `create`; the same for a stream. OpenAI's client does not check fields in `extra_body`."""
    raised = []
    for stream in (False, True):
        with pytest.raises(getattr(openai, kind)) as found:
            client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=3, stream=stream, extra_body=fields)
        raised.append((found.value.param, found.value.code, found.value.type, found.value.body))
    assert raised[0] == raised[1]
    assert set(raised[0][3]) == {"message", "type", "param", "code"}
    return raised[0][:3]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{**TOOL, "type": "custom"}]}, "tools[0].type"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x"}}]}]}, "messages[0].content[0].type"),
    ],
)
def test_what_is_known_but_not_supported_is_refused_by_name(unix_client: OpenAI, fields: dict[str, Any], param: str) -> None:
    assert refused(unix_client, **fields) == (param, "unsupported_parameter", "invalid_request_error")


def test_one_fact_is_one_error(unix_client: OpenAI) -> None:
    part = {"type": "input_audio", "input_audio": {"data": "eA==", "format": "wav"}}
    with pytest.raises(openai.BadRequestError) as found:
        unix_client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": [part]}])  # type: ignore[typeddict-item, list-item]
    assert found.value.body["message"] == "messages[0].content[0].type: input_audio is not supported yet: only text or image_url"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"], "store": False, "metadata": {}},
        {"tools": None, "stop": None, "n": None, "seed": None, "logprobs": None, "user": None, "service_tier": "auto", "logit_bias": None},
    ],
)
def test_neutral_values_are_fine(unix_client: OpenAI, fields: dict[str, Any]) -> None:
    assert unix_client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=3, extra_body=fields).choices


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"nonsense": 1}, "nonsense", "unknown_parameter"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"functions": [TOOL]}, "functions[0].name", "missing_required_parameter"),
        ({"reasoning_effort": "very high"}, "reasoning_effort", "invalid_value"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "invalid_value"),
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"temperature": "1"}, "temperature", "invalid_value"),
        ({"top_p": -0.1}, "top_p", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 1000}, "n", "invalid_value"),
        ({"n": True}, "n", "invalid_value"),
        ({"max_tokens": -2}, "max_tokens", "invalid_value"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "invalid_value"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"logit_bias": {"one": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"1": 101}}, "logit_bias.['1']", "invalid_value"),
        ({"seed": 2**70}, "seed", None),
        ({"stop": [""]}, "stop", None),
        ({"stop": ["x"] * 17}, "stop", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value"),
        ({"messages": [{"role": "user", "content": "x", "odd": 1}]}, "messages[0].odd", "unknown_parameter"),
        ({"model": 3}, "model", "invalid_value"),
        ({"stream": "yes"}, "stream", "invalid_value"),
    ],
)
def test_what_is_wrong_is_named(unix_client: OpenAI, fields: dict[str, Any], param: str, code: str | None) -> None:
    found = refused(unix_client, **fields) if "stream" not in fields else _whole(unix_client, fields)
    assert found == (param.replace(".['", "['"), code, "invalid_request_error")


def _whole(client: OpenAI, fields: dict[str, Any]) -> Any:
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=fields)
    return found.value.param, found.value.code, found.value.type


def test_usage_needs_a_stream(unix_client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="stream_options"):
        unix_client.chat.completions.create(model="tiny", messages=MESSAGES, stream_options={"include_usage": True})


@pytest.mark.parametrize("name", ["/etc/passwd", "../tiny", "Tiny", "", "tiny/", "x" * 200, "\x00"])
def test_models_go_by_their_names_only(unix_client: OpenAI, name: str) -> None:
    assert refused(unix_client, "NotFoundError", model=name) == ("model", "model_not_found", "invalid_request_error")


def test_a_prompt_beyond_the_context(unix_client: OpenAI) -> None:
    messages = [{"role": "user", "content": "x" * 5000}]
    assert refused(unix_client, messages=messages) == (None, "context_length_exceeded", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match=r"This model's maximum context length is 4096 tokens. However, your prompt has \d+ "):
        unix_client.chat.completions.create(model="tiny", messages=messages)


def test_a_path_that_is_none(unix_client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as found:
        unix_client.get("/nothing", cast_to=object)
    assert found.value.code == "unknown_url"


def test_a_method_that_a_path_has_not(unix_client: OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as found:
        unix_client.get("/chat/completions", cast_to=object)
    assert (found.value.status_code, found.value.code) == (405, "method_not_allowed")


def test_embeddings(unix_client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as found:
        unix_client.embeddings.create(model="tiny", input="x")
    assert found.value.code == "unsupported_model"


def test_a_limit_is_named_with_its_option() -> None:
    assert timed_out(20.0).message == "The request took longer than the 20 s that it may (serve --request-timeout)."
