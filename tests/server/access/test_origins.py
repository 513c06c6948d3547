"""Origins that the server accepts, and preflights of their browsers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hostile.cases import request
from support.http.live_server import LiveServer, live_server

from mlxinfer.engine.async_llm import AsyncLLM
from mlxinfer.errors import ServerError
from mlxinfer.server.settings import ServerSettings

KEY = "a key of the test"
APP, EXTENSION, OTHER = "http://localhost:3000", "vscode-webview://1a2b", "http://evil.example"


@pytest.fixture(scope="module")
def open_to_apps(tiny_path: Path) -> Iterator[LiveServer]:
    allowed = (APP.upper() + "/", "vscode-webview://*")
    with live_server({"tiny": lambda: AsyncLLM(tiny_path)}, api_key=KEY, allowed_origins=allowed) as server:
        yield server


def preflight(origin: str, *lines: str) -> bytes:
    asks = ("Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization,content-type")
    return request("/v1/chat/completions", b"", f"Origin: {origin}", *asks, *lines, method="OPTIONS")


@pytest.mark.parametrize("origin", [APP, EXTENSION])
def test_an_allowed_page(open_to_apps: LiveServer, origin: str) -> None:
    status, headers, _ = open_to_apps.exchange(preflight(origin, "Access-Control-Request-Private-Network: true"))
    assert status == 204
    assert headers["access-control-allow-origin"] == origin
    assert headers["access-control-allow-methods"] == "GET, POST"
    assert headers["access-control-allow-headers"] == "authorization,content-type"
    assert headers["access-control-allow-private-network"] == "true"
    for key, status in ((KEY, 200), ("wrong key", 401)):  # pages can read errors too
        lines = (f"Origin: {origin}", f"Authorization: Bearer {key}")
        found, headers, _ = open_to_apps.exchange(request("/v1/models", b"", *lines, method="GET"))
        assert (found, headers["access-control-allow-origin"], headers["vary"]) == (status, origin, "origin")


@pytest.mark.parametrize("origin", [OTHER, "null", "http://localhost:3001", "http://localhost:3000.evil.example", "xvscode-webview://1a2b"])
def test_any_other_page(open_to_apps: LiveServer, origin: str) -> None:
    for raw in (preflight(origin), request("/v1/models", b"", f"Origin: {origin}", f"Authorization: Bearer {KEY}", method="GET")):
        status, headers, body = open_to_apps.exchange(raw)
        assert status == 403
        assert b"--allowed-origin" in body
        assert not [name for name in headers if name.startswith("access-control")]


def test_no_page_may_use_the_unix_socket(open_to_apps: LiveServer) -> None:
    status, headers, _ = open_to_apps.exchange(preflight(APP), unix=True)
    assert status == 403
    assert not [name for name in headers if name.startswith("access-control")]


def test_an_allowed_page_needs_a_known_host_and_the_key(open_to_apps: LiveServer) -> None:
    raw = request("/v1/models", b"", f"Origin: {APP}", method="GET", host="evil.example")
    assert open_to_apps.exchange(raw)[0] == 403
    assert open_to_apps.exchange(request("/v1/models", b"", f"Origin: {APP}", method="GET"))[0] == 401
    # OPTIONS without preflight headers is like any other request
    assert open_to_apps.exchange(request("/v1/models", b"", f"Origin: {APP}", method="OPTIONS"))[0] == 401


@pytest.mark.parametrize(
    "origin", ["*", "http://*", "https://*", "null", "localhost:3000", "http://", "http://a b", "http://a.example/x", ""]
)
def test_what_is_no_origin(origin: str) -> None:
    with pytest.raises(ServerError, match=r"is no origin|every web page"):
        ServerSettings(port=0, host="127.0.0.1", allowed_origins=(origin,))
