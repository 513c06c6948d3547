"""Requests and answers in OpenAI's API, from and to the types of `LLM`."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any

from ...structure import Choice, Lark, Regex, Schema
from ...types import Chunk, Completion, FinishReason, RequestStats, SamplingParams, TokenLogprob, ToolCall, ToolCallDelta, Usage

_SENT = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("max_tokens", "stop_on_loop", "thinking_token_budget"),
)
"""Fields of `SamplingParams` with the same name in requests."""
_STRUCTURES = {Schema: ("json", "schema"), Regex: ("regex", "pattern"), Choice: ("choice", "options"), Lark: ("grammar", "grammar")}
"""Field of `structured_outputs`, and attribute, of each structure."""


def message_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its images as `data:` URLs."""
    content = message.get("content")
    return {**message, "content": content if isinstance(content, str) or content is None else [_part(part) for part in content]}


def _part(part: Mapping[str, Any]) -> Mapping[str, Any]:
    if part.get("type") != "image":
        return part
    data: bytes = part["image"]
    kind = "png" if data[:4] == b"\x89PNG" else "webp" if data[8:12] == b"WEBP" else "jpeg"
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{base64.b64encode(data).decode()}"}}


def fields_of(params: SamplingParams, *, chat: bool) -> dict[str, Any]:
    """Return the sampling fields of a request."""
    found = {name: value for name in _SENT if (value := getattr(params, name)) is not None}
    found |= {"stop": list(params.stop)} if params.stop else {}
    found |= {"stop_token_ids": list(params.stop_token_ids)} if params.stop_token_ids else {}
    found |= {"logit_bias": {str(token): bias for token, bias in params.logit_bias.items()}} if params.logit_bias else {}
    found |= {"ignore_eos": True} if params.ignore_eos else {}
    found |= {"n": params.n} if params.n > 1 else {}
    if params.logprobs is not None:
        found |= {"logprobs": True, "top_logprobs": params.logprobs} if chat else {"logprobs": params.logprobs}
    if params.structure is not None:
        field, attribute = _STRUCTURES[type(params.structure)]
        value = getattr(params.structure, attribute)
        found["structured_outputs"] = {field: list(value) if field == "choice" else value}
    if not chat:
        found.pop("thinking_token_budget", None)
    return found


def chunk_of(choice: Mapping[str, Any]) -> Chunk:
    """Return the chunk of a choice in a streamed answer, without usage."""
    delta = choice.get("delta", choice)
    calls = [
        ToolCallDelta(call["index"], call["function"].get("arguments") or "", call.get("id"), call["function"].get("name"))
        for call in delta.get("tool_calls") or ()
    ]
    return Chunk(
        delta.get("content") or delta.get("text") or "",
        logprobs=_logprobs(choice.get("logprobs")),
        finish_reason=_reason(choice),
        index=choice["index"],
        reasoning=_reasoning(delta),
        tool_calls=tuple(calls),
    )


def completion_of(choice: Mapping[str, Any], usage: Usage) -> Completion:
    """Return the completion of a choice in a whole answer."""
    message = choice.get("message", choice)
    calls = [ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return Completion(
        message.get("content") or message.get("text") or "",
        [],
        _reason(choice) or "stop",
        usage,
        _logprobs(choice.get("logprobs")),
        choice["index"],
        reasoning=_reasoning(message) or None,
        tool_calls=tuple(calls),
    )


def _reasoning(part: Mapping[str, Any]) -> str:
    return part.get("reasoning") or part.get("reasoning_content") or ""


def _reason(choice: Mapping[str, Any]) -> FinishReason | None:
    if choice.get("stop_reason") == "loop":
        return "loop"
    reason = choice.get("finish_reason")
    return "stop" if reason in ("tool_calls", "function_call") else reason


def _logprobs(found: Mapping[str, Any] | None) -> list[TokenLogprob] | None:
    """Return log-probabilities; the API has the texts of tokens, but not their ids, which are -1 here."""
    if not found:
        return None
    if "content" in found:
        return [
            _logprob(each["token"], each["logprob"], [(top["token"], top["logprob"]) for top in each["top_logprobs"]])
            for each in found["content"]
        ]
    tops: Iterable[Mapping[str, float]] = found["top_logprobs"] or [{}] * len(found["tokens"])
    return [_logprob(*each) for each in zip(found["tokens"], found["token_logprobs"], (top.items() for top in tops), strict=True)]


def _token_and_logprob(top: Mapping[str, Any]) -> tuple[str, float]:
    return top["token"], top["logprob"]


def _logprob(text: str, value: float, top: Iterable[tuple[str, float]]) -> TokenLogprob:
    return TokenLogprob(-1, text, value, tuple((-1, other, logprob) for other, logprob in top))


def usage_of(found: Mapping[str, Any] | None, first_s: float = 0.0, decode_s: float = 0.0) -> Usage:
    """Return the usage of an answer, with the client's times."""
    given = found or {}
    prompt, answer = given.get("prompt_tokens", 0), given.get("completion_tokens", 0)
    details = given.get("prompt_tokens_details") or {}
    stats = RequestStats(reused_tokens=details.get("cached_tokens", 0), image_tokens=details.get("image_tokens", 0), decode_s=decode_s)
    rate = (answer - 1) / decode_s if answer > 1 and decode_s > 0 else 0.0
    return Usage(prompt, answer, first_s, decode_tps=rate, stats=stats)
