"""Authorization and limits: raw requests against a live server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.http.live_server import LiveServer, live_server, openai_client
from support.processes.optional import needs

from mlxinfer.engine.async_llm import AsyncLLM
from mlxinfer.errors import ServerError
from mlxinfer.server.settings import Limits, ServerSettings

KEY = "a key of the test"
LIMITS = Limits(body_bytes=2000, header_bytes=4000, header_s=0.4, body_s=0.4, connections=8, keep_alive_s=0.1, write_s=0.2)


@pytest.fixture(scope="module")
def strict(tiny_path: Path) -> Iterator[LiveServer]:
    with live_server({"tiny": lambda: AsyncLLM(tiny_path)}, api_key=KEY, limits=LIMITS, allowed_hosts=("box.local",)) as server:
        yield server


def get(path: str = "/v1/models", **headers: str) -> bytes:
    lines = [f"GET {path} HTTP/1.1", *(f"{name.replace('_', '-')}: {value}" for name, value in {"host": "localhost", **headers}.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def post(body: bytes, **headers: str) -> bytes:
    fields = {"content_type": "application/json", "content_length": str(len(body)), **headers}
    return get("/v1/completions", **fields).replace(b"GET", b"POST", 1) + body


GOOD = json.dumps({"model": "tiny", "prompt": "Hello", "max_tokens": 2}).encode()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8080", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:99", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example:80", 403),
        ("box.local", 403),
        ("localhost@evil.example", 403),
        ("127.0.0.2", 403),
        ("", 403),
        ("localhost:", 403),
        ("localhost:x", 403),
        ("[::1", 403),
    ],
)
def test_hosts_on_tcp(live: LiveServer, host: str, status: int) -> None:
    assert live.exchange(get(host=host))[0] == status
    assert live.exchange(get(host=host), unix=True)[0] == 200


def test_another_name_can_be_allowed(strict: LiveServer) -> None:
    assert strict.exchange(get(host="box.local:8080", authorization=f"Bearer {KEY}"))[0] == 200


@pytest.mark.parametrize("origin", ["null", "http://evil.example", "https://localhost", "http://localhost:81", "file://", ""])
def test_other_pages_may_not_ask(live: LiveServer, origin: str) -> None:
    for unix in (False, True):
        status, headers, body = live.exchange(get(host="localhost:80", origin=origin), unix=unix)
        assert status == 403
        assert json.loads(body)["error"]["code"] == "origin_not_allowed"
        assert not [name for name in headers if name.startswith("access-control")]


def test_the_servers_own_pages_may_ask_on_tcp_only(live: LiveServer) -> None:
    assert live.exchange(get(host="localhost:80", origin="http://localhost:80"))[0] == 200
    assert live.exchange(get(host="localhost:80", origin="http://localhost:80"), unix=True)[0] == 403


def test_a_preflight_is_refused_without_headers_that_allow_anything(live: LiveServer) -> None:
    raw = get("/v1/chat/completions", origin="http://evil.example", access_control_request_method="POST").replace(b"GET", b"OPTIONS", 1)
    status, headers, _ = live.exchange(raw)
    assert status == 403
    assert not [name for name in headers if name.startswith("access-control")]


def test_a_key_is_asked_for_on_tcp_and_not_on_the_socket(strict: LiveServer) -> None:
    assert strict.exchange(get())[0] == 401
    assert strict.exchange(get(), unix=True)[0] == 200
    assert strict.exchange(get("/health"))[0] == 200
    assert strict.exchange(get("/metrics"))[0] == 401
    assert strict.exchange(get(authorization=f"Bearer {KEY}"))[0] == 200
    assert strict.exchange(get(x_api_key=KEY))[0] == 200
    for wrong in (f"Bearer {KEY}x", "Bearer", "Bearer ", f"Basic {KEY}", KEY, "Bearer \xff"):
        status, headers, body = strict.exchange(get(authorization=wrong))
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
        assert KEY.encode() not in body


def test_openais_client_says_so(strict: LiveServer) -> None:
    openai = needs("openai")
    with openai_client(strict, unix=False, api_key="wrong") as client, pytest.raises(openai.AuthenticationError) as found:
        client.models.list()
    assert found.value.code == "invalid_api_key"
    with openai_client(strict, unix=False, api_key=KEY) as client:
        assert client.models.list().data
    with (
        openai_client(strict, unix=False, api_key=KEY, default_headers={"Origin": "null"}) as client,
        pytest.raises(openai.PermissionDeniedError),
    ):
        client.models.list()


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (post(GOOD), 200),
        (post(GOOD, content_type="application/json; charset=utf-8"), 200),
        (post(GOOD, content_type="text/plain"), 415),
        (post(GOOD, content_type="application/x-www-form-urlencoded"), 415),
        (post(GOOD, content_encoding="gzip"), 415),
        (post(b""), 400),
        (post(b"x" * 3000), 413),
        (post(b"", content_length="9999999999999999999"), 413),
        (post(b"{"), 400),
        (post(b"[" * 1500), 400),
        (post(b"\xff\xfe"), 400),
        (post(b'{"model": "\\ud800"}'), 400),
        (post(b"null"), 400),
        (post(b'{"model":"tiny","prompt":"x","temperature":NaN}'), 400),
        (post(b'{"model":"tiny","prompt":"x","max_tokens":1e400}'), 400),
        (get(big="x" * 5000), 431),
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n", 400),
        (get("/v1/models/../../etc/passwd"), 404),
        (get("/v1/models/%2e%2e%2f%2e%2e"), 404),
        (get("//evil.example/"), 404),
    ],
)
def test_bodies_and_heads(strict: LiveServer, raw: bytes, status: int) -> None:
    assert strict.exchange(raw, unix=True)[0] == status
    assert strict.exchange(get(), unix=True)[0] == 200


def test_a_chunked_body_is_counted_as_it_comes(strict: LiveServer) -> None:
    head = get("/v1/completions", transfer_encoding="chunked", content_type="application/json").replace(b"GET", b"POST", 1)
    assert strict.exchange(head + b"200\r\n" + b"x" * 0x200 + b"\r\n" + b"800\r\n" + b"x" * 0x800 + b"\r\n0\r\n\r\n", unix=True)[0] == 413
    assert strict.exchange(head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(GOOD), GOOD), unix=True)[0] == 200


@pytest.mark.parametrize("begun", [b"", b"GET /v1/mod", get()[:-2]], ids=["nothing", "line", "headers"])
def test_slow_headers_end_the_connection(strict: LiveServer, begun: bytes) -> None:
    with strict.connect(unix=True) as connection:
        connection.sendall(begun)
        assert connection.recv(100) == b""


def test_an_idle_connection_is_ended(strict: LiveServer) -> None:
    with strict.connect(unix=True) as connection:
        connection.sendall(get())
        received = b""
        while part := connection.recv(10_000):
            received += part
        assert received.count(b"HTTP/1.1 200") == 1


def test_a_slow_body_is_refused(strict: LiveServer) -> None:
    status, _, body = strict.exchange(post(GOOD)[:-1], unix=True)
    assert (status, json.loads(body)["error"]["code"]) == (408, "timeout")


def test_more_connections_than_there_may_be_are_dropped(strict: LiveServer) -> None:
    connections = [strict.connect(unix=True) for _ in range(LIMITS.connections)]
    try:
        with pytest.raises((ConnectionError, OSError)):
            strict.exchange(get(), unix=True)
    finally:
        for connection in connections:
            connection.close()
    while True:
        try:
            assert strict.exchange(get(), unix=True)[0] == 200
            break
        except (ConnectionError, OSError):
            continue


def test_a_client_that_stops_reading_is_dropped(strict: LiveServer) -> None:
    body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 4000, "logprobs": 20, "stream": True}).encode()
    with strict.connect(unix=True) as deaf:
        deaf.sendall(post(body))
        strict.until(lambda s: s.running > 0)
        strict.until(lambda s: s.running == 0)
        connections = strict.server.server_state.connections
        deadline = time.monotonic() + 60
        while connections and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not connections


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org"])
def test_other_addresses_than_loopback_need_a_key(host: str) -> None:
    with pytest.raises(ServerError, match="needs a key"):
        ServerSettings(host=host)
    assert ServerSettings(host=host, api_key=KEY).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.9.9.9"])
def test_loopback_needs_none(host: str) -> None:
    assert ServerSettings(host=host).api_key is None


@pytest.mark.parametrize("key", ["short", "with\nline", "schlüssel-x"])
def test_odd_keys(key: str) -> None:
    with pytest.raises(ServerError, match="key"):
        ServerSettings(host="127.0.0.1", api_key=key)
