"""The wire format, field by field: answers, streams and errors of every dialect, compared with a golden file.

Texts, tokens, probabilities and times are left out. After an intended change of the format, run `MLXINFER_WRITE_GOLDEN=1 pytest
tests/server/dialects/test_contract.py` and read the difference.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from support.hostile.cases import request
from support.http.live_server import LiveServer

GOLDEN = Path(__file__).parents[2] / "golden" / "wire.json"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
THREE = {"temperature": 0, "max_tokens": 3}
USAGE = {"stream_options": {"include_usage": True}}
GENERATING: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {**HI, **THREE}, USAGE),
    "chat with logprobs": ("/v1/chat/completions", {**HI, **THREE, "logprobs": True, "top_logprobs": 1}, {}),
    "completions": ("/v1/completions", {"prompt": "Hello", **THREE}, USAGE),
    "completions that echo": ("/v1/completions", {"prompt": "Hello", **THREE, "echo": True, "logprobs": 1}, {}),
    "completions that read only": ("/v1/completions", {"prompt": "Hello", "max_tokens": 0, "echo": True, "logprobs": 1}, {}),
    "responses": ("/v1/responses", {"input": "Hello", "temperature": 0, "max_output_tokens": 3}, {}),
    "messages": ("/v1/messages", {**HI, **THREE, "cache_control": {"type": "ephemeral"}}, {}),
    "ollama chat": ("/api/chat", {**HI, "options": {"num_predict": 3}, "stream": False}, {}),
    "ollama generate": ("/api/generate", {"prompt": "Hello", "options": {"num_predict": 3}, "stream": False}, {}),
}
ASKING: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "health": ("GET", "/health", None),
    "models": ("GET", "/v1/models", None),
    "one model": ("GET", "/v1/models/tiny", None),
    "no such model": ("GET", "/v1/models/other", None),
    "embeddings": ("POST", "/v1/embeddings", {"model": "tiny", "input": "Hello"}),
    "rerank": ("POST", "/v1/rerank", {"model": "tiny", "query": "Hello", "documents": ["One"]}),
    "score": ("POST", "/v1/score", {"model": "tiny", "text_1": "Hello", "text_2": ["One"]}),
    "ollama embed": ("POST", "/api/embed", {"model": "tiny", "input": "Hello"}),
    "ollama embeddings": ("POST", "/api/embeddings", {"model": "tiny", "prompt": "Hello"}),
    "two prompts": ("POST", "/v1/completions", {"model": "tiny", "prompt": ["One", "Two"], **THREE, "n": 2}),
    "count_tokens": ("POST", "/v1/messages/count_tokens", {"model": "tiny", **HI}),
    "ollama tags": ("GET", "/api/tags", None),
    "ollama ps": ("GET", "/api/ps", None),
    "ollama show": ("POST", "/api/show", {"model": "tiny"}),
    "ollama version": ("GET", "/api/version", None),
    "ollama load": ("POST", "/api/chat", {"model": "tiny", "stream": False}),
    "no such path": ("GET", "/v1/nothing", None),
    "wrong method": ("GET", "/v1/chat/completions", None),
    "ollama: no such path": ("GET", "/api/nothing", None),
    "anthropic: wrong method": ("GET", "/v1/messages", None),
}
FAULTY: dict[str, dict[str, Any]] = {
    "unknown field": {"model": "tiny", "colour": "red"},
    "unknown model": {"model": "other"},
    "tools": {"model": "tiny", "tools": [1]},
    "a wrong type": {"model": 1},
}
ASKING |= {
    f"{path} with {fault}": ("POST", path, {**least, **body})
    for path, least in {
        "/v1/chat/completions": HI,
        "/v1/responses": {"input": "Hello"},
        "/v1/messages": {**HI, "max_tokens": 3},
        "/api/chat": HI,
    }.items()
    for fault, body in FAULTY.items()
}

_IDS = re.compile(r"^(chatcmpl|cmpl|resp|msg)[-_][0-9a-f]{32}$")
_TEXTS = {"text", "content", "delta", "response", "token", "tokens", "bytes", "text_offset", "context"}
_CACHED = {"cached_tokens", "cache_read_input_tokens", "input_tokens", "total_tokens"}
_VARIES = {
    "created",
    "created_at",
    "modified_at",
    "digest",
    "size",
    "size_vram",
    "size_limit",
    "system_fingerprint",
    "sequence_number",
    "version",
    "mlxinfer",
}


def neutral(value: Any, key: str = "") -> Any:
    """The value without parts that depend on the model, the machine or the run."""
    if isinstance(value, dict):
        return {"…": 0.0} if key == "top_logprobs" else {name: neutral(one, name) for name, one in value.items()}
    if key in _VARIES | _CACHED or key.endswith("_duration"):
        return type(value).__name__
    if isinstance(value, list):
        return f"{len(value)} of them" if key in _TEXTS and not (value and isinstance(value[0], dict)) else [neutral(v, key) for v in value]
    if isinstance(value, str):
        return "…" if key in _TEXTS and value else _IDS.sub(r"\1", value)
    return 0.0 if isinstance(value, float) else value


def events(body: bytes, kind: str) -> list[Any]:
    """Events of a stream, without repetitions of equal neighbours, because the texts of tokens differ."""
    parts = body.decode().strip().split("\n" if kind.startswith("application/") else "\n\n")
    found: list[Any] = []
    for part in parts:
        name, _, data = part.rpartition("data: ")
        event = [name.strip(), data if data == "[DONE]" else neutral(json.loads(data))]
        if not found or found[-1] != event:
            found.append(event)
    return found


def answer(live: LiveServer, path: str, body: dict[str, Any] | None, method: str = "POST") -> dict[str, Any]:
    raw = b"" if body is None else json.dumps(body).encode()
    status, headers, found = live.exchange(request(path, raw, "Content-Type: application/json", method=method))
    assert re.fullmatch("[0-9a-f]{32}", headers.pop("x-request-id"))
    assert headers.pop("request-id")
    kind = headers["content-type"]
    shown = {name: value for name, value in headers.items() if name not in ("date", "content-length")}
    streamed = kind.startswith(("text/event-stream", "application/x-ndjson"))
    return {"status": status, "headers": shown, "body": events(found, kind) if streamed else neutral(json.loads(found))}


def compare(name: str, found: dict[str, Any]) -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}
    if os.environ.get("MLXINFER_WRITE_GOLDEN"):
        written = dict(sorted({**golden, name: found}.items()))
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in written.items())
        GOLDEN.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
        return
    assert found == golden[name]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", GENERATING)
def test_answers(live: LiveServer, name: str, stream: bool) -> None:
    path, body, streaming = GENERATING[name]
    more = {"stream": True, **streaming} if stream else {}
    compare(f"{name}, {'streamed' if stream else 'whole'}", answer(live, path, {"model": "tiny", **body, **more}))


@pytest.mark.parametrize("name", ASKING)
def test_everything_else(live: LiveServer, name: str) -> None:
    method, path, body = ASKING[name]
    compare(name, answer(live, path, body, method))
