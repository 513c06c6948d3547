"""Unknown paths: the answer and the log reveal a wrong base URL, and the log repeats no foreign text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.hostile.cases import request
from support.http.live_server import LiveServer

from mlxinfer.server import log
from mlxinfer.server.app import KnownPaths

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/openai/v1/responses", "/v1/responses"),
        ("/completions", "/v1/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/model", "/v1/models"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/messages/v1/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/v1/api/chat", "/api/chat"),
        ("/tags", "/api/tags"),
    ],
)
def test_what_was_meant(live: LiveServer, path: str, meant: str) -> None:
    status, _, body = live.exchange(request(path, b"{}", "Content-Type: application/json"), unix=True)
    assert status == 404
    assert body.decode().count(f"There is nothing at this path: did you mean {meant}?") == 1


@pytest.mark.parametrize("path", ["/nothing", "/v1", "/v1/", "/favicon.ico", "/v1/audio/speech", "//", "/%00", "/%C3%A4"])
def test_nothing_is_guessed(live: LiveServer, path: str) -> None:
    status, _, body = live.exchange(request(path, b"{}", "Content-Type: application/json"), unix=True)
    assert (status, b"did you mean" in body) == (404, False)


def test_the_log_shows_known_words_only() -> None:
    known = KnownPaths(["/v1/chat/completions", "/api/chat"])
    assert known.shown("/v1/v1/chat/completions") == "/v1/v1/chat/completions"
    assert known.shown("/sk-secret/v1/chat/My prompt/") == "/*/v1/chat/*/"


def test_the_path_is_in_the_log(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(log, "access", lines.append)
    live.exchange(request("/v1/v1/secret/chat/completions", b"{}"), unix=True)
    live.until(lambda stats: bool(lines))  # it is written after the answer
    assert [(line["route"], line["path"]) for line in lines] == [("unknown", "/v1/v1/*/chat/completions")]


def ask(live: LiveServer, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    raw = request(path, json.dumps({"max_tokens": 1, **body}).encode(), "Content-Type: application/json")
    status, _, answer = live.exchange(raw, unix=True)
    return status, json.loads(answer)


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/messages": {"messages": MESSAGES},
}


@pytest.mark.parametrize("path", BODIES)
def test_names_with_ollamas_tag_are_found(live: LiveServer, path: str) -> None:
    assert ask(live, path, model="tiny:latest", **BODIES[path])[0] == 200
    status, answer = ask(live, path, model="tiny:7b", **BODIES[path])
    assert status == 404
    assert answer["error"]["message"] == "The model 'tiny:7b' is not served here; available: tiny."


def test_the_tag_is_found_where_models_and_responses_are_asked_for(live: LiveServer) -> None:
    assert json.loads(live.exchange(request("/v1/models/tiny:latest", method="GET"), unix=True)[2])["id"] == "tiny"
    raw = request("/v1/responses", b'{"model":"tiny:latest","input":"Hi","max_output_tokens":1}', "Content-Type: application/json")
    assert live.exchange(raw, unix=True)[0] == 200


def test_models_for_anthropics_clients(live: LiveServer) -> None:
    found = json.loads(live.exchange(request("/v1/models", method="GET"), unix=True)[2])
    assert (found["has_more"], found["first_id"], found["last_id"]) == (False, "tiny", "tiny")
    (model,) = found["data"]
    assert (model["type"], model["display_name"]) == ("model", "tiny")
    assert model["created_at"].endswith("Z")


@pytest.mark.parametrize(("method", "path", "allowed"), [("GET", "/v1/completions", "POST"), ("POST", "/metrics", "GET, HEAD")])
def test_a_path_says_which_methods_it_takes(live: LiveServer, method: str, path: str, allowed: str) -> None:
    status, headers, _ = live.exchange(request(path, method=method), unix=True)
    assert (status, headers["allow"]) == (405, allowed)
