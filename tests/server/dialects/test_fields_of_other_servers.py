"""Fields that real programs send and that have no effect here: they are accepted, change no answer, and are logged by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.hostile.cases import request
from support.http.live_server import LiveServer

from mlxinfer.server import log

MESSAGES = [{"role": "user", "content": "Hello"}]
CHAT = {"messages": MESSAGES, "temperature": 0, "max_tokens": 3}
RESPONSE = {"input": "Hello", "temperature": 0, "max_output_tokens": 3}
CLAUDE = {"messages": MESSAGES, "temperature": 0, "max_tokens": 3}
OLLAMA = {"messages": MESSAGES, "stream": False, "options": {"temperature": 0, "num_predict": 3}}

TAKEN: dict[str, tuple[str, dict[str, Any], dict[str, Any], set[str]]] = {
    "codex": (
        "/v1/responses",
        RESPONSE,
        {
            "include": ["reasoning.encrypted_content"],
            "client_metadata": {"installation": "x"},
            "reasoning": {"effort": "none", "summary": "auto"},
            "text": {"verbosity": "low"},
            "store": True,
            "prompt_cache_key": "x",
            "parallel_tool_calls": False,
            "tool_choice": "auto",
            "truncation": "auto",
            "service_tier": "flex",
        },
        {
            *("include", "client_metadata", "text.verbosity", "store"),
            *("prompt_cache_key", "truncation", "service_tier"),
        },
    ),
    "claude code": ("/v1/messages", CLAUDE, {"thinking": {"type": "adaptive"}, "service_tier": "auto"}, {"service_tier"}),
    "openai": (
        "/v1/chat/completions",
        CHAT,
        {
            "reasoning_effort": "none",
            "verbosity": "low",
            "store": True,
            "metadata": {"a": "b"},
            "top_logprobs": 0,
            "parallel_tool_calls": False,
        },
        {"verbosity", "store", "metadata"},
    ),
    "llama.cpp's web page": (
        "/v1/chat/completions",
        CHAT,
        {
            "cache_prompt": True,
            "samplers": ["top_k", "temperature"],
            "dynatemp_range": 0,
            "dynatemp_exponent": 1,
            "typical_p": 1,
            "mirostat": 0,
            "xtc_probability": 0,
            "xtc_threshold": 0.1,
            "repeat_last_n": 64,
            "repeat_penalty": 1,
            "dry_multiplier": 0,
            "dry_base": 1.75,
            "timings_per_token": True,
            "n_predict": -1,
            "id_slot": -1,
            "reasoning_format": "auto",
        },
        {"cache_prompt", "samplers", "xtc_threshold", "repeat_last_n", "dry_base", "timings_per_token", "id_slot", "reasoning_format"}
        | {"dynatemp_exponent"},
    ),
    "vllm": (
        "/v1/chat/completions",
        CHAT,
        {"skip_special_tokens": True, "min_tokens": 0, "add_generation_prompt": True, "length_penalty": 1.0, "use_beam_search": False},
        {"length_penalty"},
    ),
    "openrouter and lm studio": (
        "/v1/chat/completions",
        CHAT,
        {"provider": {"sort": "price"}, "usage": {"include": True}, "models": ["a", "b"], "transforms": ["middle-out"], "ttl": 300},
        {"provider", "usage", "models", "transforms"},
    ),
    "aider over ollama": (
        "/api/chat",
        OLLAMA,
        {
            "keep_alive": 0,
            "truncate": True,
            "options": {**OLLAMA["options"], "num_ctx": 8989, "repeat_last_n": 64, "num_gpu": 99},  # type: ignore[dict-item]
        },
        {"truncate", "options.repeat_last_n", "options.num_gpu", "options.num_ctx"},
    ),
    "ollama show -v": ("/api/show", {}, {"verbose": True}, {"verbose"}),
}


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(log, "_NOTICED", set())
    monkeypatch.setattr(log, "notice", lambda message, **fields: told.append(message))
    return told


def ask(live: LiveServer, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    status, _, answer = live.exchange(
        request(path, json.dumps({"model": "tiny", **body}).encode(), "Content-Type: application/json"), unix=True
    )
    return status, json.loads(answer)


def text_of(answer: dict[str, Any]) -> Any:
    """The model's text, in any dialect."""
    if "choices" in answer:
        return answer["choices"][0]["message"]
    return answer.get("output", [{}])[0].get("content") or answer.get("content") or answer.get("message") or answer.get("details")


@pytest.mark.parametrize("client", TAKEN)
def test_programs_get_the_answer_that_they_would_get_without(live: LiveServer, notes: list[str], client: str) -> None:
    path, least, fields, noted = TAKEN[client]
    plain = ask(live, path, least)
    assert plain[0] == 200, plain
    notes.clear()
    for _ in range(2):
        status, answer = ask(live, path, {**least, **fields})
        assert status == 200, answer
        assert text_of(answer) == text_of(plain[1])
    assert sorted(note.split()[0] for note in notes) == sorted(noted)


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "least", "field"),
    [("/v1/chat/completions", CHAT, "max_tokens"), ("/v1/responses", RESPONSE, "max_output_tokens"), ("/v1/completions", {}, "max_tokens")],
)
def test_minus_one_is_no_limit(live: LiveServer, path: str, least: dict[str, Any], field: str) -> None:
    body = least or {"prompt": "Hello", "temperature": 0}
    status, answer = ask(live, path, {**body, "temperature": 1, field: -1, "seed": 3, "stop": ["\n"]})
    assert status == 200
    usage = answer["usage"]
    assert usage.get("completion_tokens", usage.get("output_tokens")) > 16
    assert ask(live, path, {**body, field: -2})[0] == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"xtc_probability": 0.5}, "xtc_probability"),
        ({"dry_multiplier": 0.8}, "dry_multiplier"),
        ({"repeat_penalty": 1.1}, "repeat_penalty"),
        ({"grammar": "root ::= x"}, "grammar"),
        ({"plugins": [{"id": "web"}]}, "plugins"),
    ],
)
def test_what_asks_for_more_is_refused(live: LiveServer, fields: dict[str, Any], param: str) -> None:
    status, answer = ask(live, "/v1/chat/completions", {**CHAT, **fields})
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, "unsupported_parameter")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_all_faults_are_named_at_once(live: LiveServer, path: str) -> None:
    least = RESPONSE if path == "/v1/responses" else CHAT
    status, answer = ask(live, path, {**least, "temperature": 9, "colour": 1, "shape": 2, "store": True})
    message = answer["error"]["message"]
    assert status == 400
    assert all(name in message for name in ("temperature: ", "Unknown field: colour", "Unknown field: shape"))
