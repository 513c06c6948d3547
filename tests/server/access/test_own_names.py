"""A server for other machines accepts this machine's address and names, and no other name."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.http.live_server import LiveServer, live_server

from mlxinfer.engine.async_llm import AsyncLLM
from mlxinfer.server.access import own_names
from mlxinfer.server.access.auth import Auth
from mlxinfer.server.access.own_names import addresses_for_others
from mlxinfer.server.access.sockets import tcp_socket
from mlxinfer.server.errors import APIError
from mlxinfer.server.settings import ServerSettings

KEY = "a key of the test"


@pytest.fixture(autouse=True)
def _named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_names.socket, "gethostname", lambda: "Desk.example.org")


def let_in(host: str, came_to: str, *, key: str | None = KEY, bound: str = "0.0.0.0") -> bool:
    auth = Auth(ServerSettings(host=bound, port=1, api_key=key))
    scope = {"headers": [(b"host", host.encode()), (b"authorization", f"Bearer {KEY}".encode())], "raw_path": b"/", "path": "/"}
    try:
        auth.check({**scope, "http_version": "1.1", "method": "GET", "server": (came_to, 18080)})
    except APIError as error:
        return error.code != "host_not_allowed"
    return True


@pytest.mark.parametrize(
    "host", ["192.168.1.20:18080", "192.168.1.20", "desk:18080", "DESK.local:18080", "desk.example.org", "localhost:1"]
)
def test_own_addresses_and_names_are_let_in(host: str) -> None:
    assert let_in(host, "192.168.1.20")


@pytest.mark.parametrize(
    "host", ["192.168.1.21:18080", "desk.evil.example", "evil.example", "192.168.1.20.evil.example", "other.local", ""]
)
def test_others_are_not(host: str) -> None:
    assert not let_in(host, "192.168.1.20")


def test_ipv6_with_a_zone() -> None:
    assert let_in("[fe80::1]:18080", "fe80::1%en0", bound="::")
    assert not let_in("[fe80::2]:18080", "fe80::1%en0", bound="::")


def test_a_server_for_this_machine_alone_has_no_further_names() -> None:
    assert not let_in("desk.local", "127.0.0.1", bound="127.0.0.1")
    assert not let_in("127.0.0.2", "127.0.0.2", key=None, bound="127.0.0.1")


@pytest.fixture
def everywhere(tiny_path: Path) -> Iterator[LiveServer]:
    with live_server({"tiny": lambda: AsyncLLM(tiny_path)}, host="0.0.0.0", api_key=KEY) as server:
        yield server


def test_over_a_socket(everywhere: LiveServer) -> None:
    own = own_names._own_address(socket.AF_INET) or "127.0.0.1"

    def ask(host: str) -> int:
        head = f"GET /v1/models HTTP/1.1\r\nHost: {host}:{everywhere.port}\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n\r\n"
        with socket.create_connection((own, everywhere.port)) as connection:
            connection.sendall(head.encode())
            return int(connection.recv(64).split()[1])

    assert [ask(host) for host in (own, "desk.local", "203.0.113.9", "evil.example")] == [200, 200, 403, 403]


def test_what_to_type_on_a_phone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_names, "_own_address", lambda family: "192.168.1.20")
    settings = ServerSettings(host="0.0.0.0", port=0, api_key=KEY)
    with tcp_socket("0.0.0.0", 0) as listener:
        port = listener.getsockname()[1]
        assert addresses_for_others([listener], settings) == [f"http://192.168.1.20:{port}", f"http://desk.local:{port}"]
    with tcp_socket("127.0.0.1", 0) as listener:
        assert addresses_for_others([listener], settings) == []
