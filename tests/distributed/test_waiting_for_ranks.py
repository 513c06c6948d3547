"""Rank 0 while it waits for the others."""

from __future__ import annotations

import socket
import time
from dataclasses import asdict, replace
from threading import Thread

import pytest
from support.ports import free_port

from mlxinfer.distributed import group as module
from mlxinfer.distributed.agreement import Hello
from mlxinfer.distributed.group import Group
from mlxinfer.distributed.link import Kind, Link
from mlxinfer.distributed.nodes import Node, Nodes
from mlxinfer.errors import NodesError


def reached(nodes: Nodes) -> socket.socket:
    end = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(nodes.control, 5)
        except OSError:
            assert time.monotonic() < end


def test_a_connection_that_says_nothing_keeps_no_rank_waiting(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "_HELLO_S", 0.1)
    port = free_port()
    nodes = Nodes((Node("127.0.0.1", port + 1), Node("127.0.0.1", port + 2)))
    group, mine = Group(nodes), Hello.mine(0, nodes.digest, "m", 100)
    found: list[list[int]] = []
    waiting = Thread(target=lambda: found.append(group._gather(mine)), daemon=True)
    waiting.start()
    with reached(nodes):
        link = Link(reached(nodes))
        link.tell(Kind.HELLO, asdict(replace(mine, rank=1, memory=50)))
        waiting.join(60)
        assert not waiting.is_alive()  # while the silent connection is still open
    assert found == [[100, 50]]
    assert "refused what is no rank of this version" in capfd.readouterr().err
    assert group._links[0]._socket.gettimeout() is None
    group.close()
    link.close()


@pytest.mark.parametrize(("address", "port"), [("203.0.113.1", 32323), ("127.0.0.1", 70000)])
def test_an_address_of_another_machine_is_an_error_in_one_line(address: str, port: int) -> None:
    nodes = Nodes((Node(address, port), Node("127.0.0.1", port)))
    with pytest.raises(NodesError, match=f"rank 0 cannot wait for the others at {address}:{port - 1}: .*; its address") as found:
        Group(nodes)._gather(Hello.mine(0, nodes.digest, "m", 100))
    assert "\n" not in str(found.value)
