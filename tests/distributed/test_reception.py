"""Rank 0 while it waits for the others."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from dataclasses import asdict, replace
from threading import Thread

import pytest
from support.http.ports import free_port

from mlxinfer.distributed import reception
from mlxinfer.distributed.agreement import Hello, Orders
from mlxinfer.distributed.control_channel import HEADER, ControlChannel, FrameKind
from mlxinfer.distributed.group import Group
from mlxinfer.distributed.nodes import Host, Nodes
from mlxinfer.distributed.reception import MAX_HELLO_BYTES, MAX_PENDING
from mlxinfer.errors import NodesError


def reached(nodes: Nodes) -> socket.socket:
    end = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(nodes.control, 5)
        except OSError:
            assert time.monotonic() < end


def gathering() -> tuple[Group, Hello, Thread, list[list[int]]]:
    """Rank 0 of two, waiting in a thread, and what it will have found."""
    port = free_port()
    nodes = Nodes((Host("127.0.0.1", port + 1), Host("127.0.0.1", port + 2)))
    group, mine = Group(nodes), Hello.mine(0, nodes.digest, "m", 100)
    found: list[list[int]] = []
    waiting = Thread(target=lambda: found.append(group._gather(mine)), daemon=True)
    waiting.start()
    return group, mine, waiting, found


def joined(group: Group, mine: Hello, waiting: Thread) -> None:
    """Have rank 1 join, while all other connections are still open."""
    channel = ControlChannel(reached(group.nodes))
    channel.send_json(FrameKind.HELLO, asdict(replace(mine, rank=1, memory=50)))
    waiting.join(60)
    assert not waiting.is_alive()
    assert group._channels[0]._socket.gettimeout() is None
    group.close()
    channel.close()


@pytest.mark.timeout(120)
def test_connections_that_say_nothing_keep_no_rank_waiting() -> None:
    """One after another, they would take 5 s each. Some have sent a part of what a rank says."""
    group, mine, waiting, found = gathering()
    idle = [reached(group.nodes) for _ in range(3 * MAX_PENDING)]
    for number, connection in enumerate(idle):
        with suppress(OSError):  # the oldest have been left
            connection.send(b"\0\0\1\0\0{"[: number % 7])
    joined(group, mine, waiting)
    assert found == [[100, 50]]
    for connection in idle:
        connection.close()


def test_a_connection_that_says_nothing_is_left_after_a_while(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(reception, "HELLO_S", 0.1)
    group, mine, waiting, _ = gathering()
    with reached(group.nodes) as silent:
        silent.settimeout(60)
        assert ControlChannel(silent).receive()[0] is FrameKind.REFUSED
    assert "refused what is no rank of this version" in capfd.readouterr().err
    joined(group, mine, waiting)


def frame(told: object, kind: int = FrameKind.HELLO, size: int | None = None) -> bytes:
    payload = told if isinstance(told, bytes) else json.dumps(told).encode()
    return HEADER.pack(kind, len(payload) if size is None else size) + payload


def test_what_no_rank_says_is_refused_and_rank_0_waits_on() -> None:
    group, mine, waiting, found = gathering()
    right = asdict(replace(mine, rank=1))
    lies = [
        frame(right, size=MAX_HELLO_BYTES + 1),
        frame(right, size=(1 << 32) - 1),
        frame(right, kind=FrameKind.STEPS),
        frame(right, kind=200),
        frame(b"[" * 60_000),
        frame(b"{" + b"\xff" * 10 + b"}"),
        frame([1, 2]),
        frame({}),
        frame(right | {"rank": "1"}),
        frame(right | {"rank": True}),
        frame(right | {"memory": "much"}),
        frame(right | {"memory": None}),
        frame(right | {"memory": 1e400}),
        frame(right | {"nodes": ["x"]}),
        frame(right | {"path": "/etc/passwd"}),
        frame(right | {"rank": -1}),
        frame(right | {"rank": 10**30}),
        frame(right | {"version": "9" * 50_000}),
        b"GET / HTTP/1.1\r\n\r\n",
    ]
    for lie in lies:
        with reached(group.nodes) as connection:
            connection.settimeout(60)
            connection.sendall(lie)
            kind, payload = ControlChannel(connection).receive()
            assert (kind, len(payload) < 500) == (FrameKind.REFUSED, True), lie[:80]
    joined(group, mine, waiting)
    assert found == [[100, 50]]


def test_rank_0_names_no_files() -> None:
    orders = Orders(memory=[1], plan="", split="", settings={"draft": "/etc"}, adapters={}, outside_blocks=0, taps=[], windows=[])
    with pytest.raises(NodesError, match="rank 0 sets 'draft', which each rank sets for itself"):
        orders.args("model", 1.0, None)


@pytest.mark.parametrize(("address", "port"), [("203.0.113.1", 32323), ("127.0.0.1", 70000)])
def test_an_address_of_another_machine_is_an_error_in_one_line(address: str, port: int) -> None:
    nodes = Nodes((Host(address, port), Host("127.0.0.1", port)))
    with pytest.raises(NodesError, match=f"rank 0 cannot wait for the others at {address}:{port - 1}: .*; its address") as found:
        Group(nodes)._gather(Hello.mine(0, nodes.digest, "m", 100))
    assert "\n" not in str(found.value)
