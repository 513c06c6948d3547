"""Without a group, clients cannot block the supervisor, and lost machines cannot block rank 0."""

from __future__ import annotations

import socket
import time
from threading import Thread, Timer

import pytest

from mlxinfer.distributed import supervise
from mlxinfer.distributed.control_channel import ControlChannel, FrameKind
from mlxinfer.distributed.group import Group
from mlxinfer.distributed.nodes import Host, Nodes
from mlxinfer.distributed.supervise import Supervisor, _refuse
from mlxinfer.errors import GroupLostError


def pair_of_tcp() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return socket.create_connection(listener.getsockname()), listener.accept()[0]


def send_on(connection: socket.socket) -> None:
    for _ in range(3000):
        connection.send(b"x")
        time.sleep(0.01)


def test_one_that_never_ends_its_request_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "_LAST_S", 0.2)
    ours, theirs = socket.socketpair()
    refusing = Thread(target=_refuse, args=(theirs,), daemon=True)
    with ours:
        ours.send(b"POST / HTTP/1.1\r\n")
        refusing.start()
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            send_on(ours)
        assert ours.recv(12) == b"HTTP/1.1 503"


def test_one_that_has_left_before_it_is_accepted_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        supervisor = Supervisor([], [listener])
        told = [[listener.fileno()], []]
        monkeypatch.setattr(supervise.select, "select", lambda *_: (told.pop(0), [], []))
        guard = Timer(30, lambda: socket.create_connection(listener.getsockname()).close())
        guard.start()
        supervisor._answer_until(None, 1.0)
        assert guard.is_alive()
        guard.cancel()


def test_a_machine_without_power_is_noticed_while_models_load() -> None:
    """Ranks send no heartbeats during loading; TCP keep-alive detects the loss."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        channel = ControlChannel.connect(listener.getsockname(), 5.0)
        assert channel._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle = getattr(socket, "TCP_KEEPIDLE", None) or socket.TCP_KEEPALIVE
        assert channel._socket.getsockopt(socket.IPPROTO_TCP, idle) <= 60
        channel.close()


def test_a_rank_that_goes_while_others_are_waited_for_is_a_loss_and_no_mistake() -> None:
    group = Group(Nodes((Host("127.0.0.1", 2), Host("127.0.0.1", 3))))
    ours, theirs = pair_of_tcp()
    with theirs:
        group._channels = [channel := ControlChannel(ours)]
        channel.close()
        with pytest.raises(GroupLostError, match=r"rank 1 .* has ended"):
            group._send_all(FrameKind.PLAN, {})
