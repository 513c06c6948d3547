"""Listening sockets, and the users who may connect."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from http.client import HTTPException
from pathlib import Path

import pytest
from support.http.live_server import LiveServer

from mlxinfer.errors import ServerError
from mlxinfer.server.access import connection as server_connection
from mlxinfer.server.access import sockets as server_sockets
from mlxinfer.server.access.sockets import (
    address,
    is_allowed,
    listening,
    passed_sockets,
    peer_uid,
    private_directory,
    tcp_socket,
    unix_socket,
)
from mlxinfer.server.settings import ServerSettings


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def place(short_path: Path) -> Path:
    return short_path / "run" / "api.sock"


def test_the_socket_is_its_owners_alone_and_goes_at_the_end(place: Path) -> None:
    with unix_socket(place) as listener:
        assert (mode(place.parent), mode(place)) == (0o700, 0o600)
        assert address(listener) == f"unix:{place}"
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(place))
    assert not place.exists()


def test_a_umask_changes_nothing(place: Path) -> None:
    before = os.umask(0)
    try:
        with unix_socket(place):
            assert (mode(place.parent), mode(place)) == (0o700, 0o600)
    finally:
        os.umask(before)


def test_a_live_socket_is_left_alone(place: Path) -> None:
    with unix_socket(place), pytest.raises(ServerError, match="another server listens"), unix_socket(place):
        pass
    with unix_socket(place):
        pass


def test_a_live_socket_of_another_program_is_left_alone(place: Path) -> None:
    place.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(place))
        other.listen()
        with pytest.raises(ServerError, match="another server listens"), unix_socket(place):
            pass
        assert place.exists()


def test_what_a_dead_server_left_is_replaced(place: Path) -> None:
    script = f"""
import os
from pathlib import Path
from mlxinfer.server.access.sockets import unix_socket
with unix_socket(Path({str(place)!r})):
    os._exit(1)
"""
    subprocess.run([sys.executable, "-c", script], check=False)
    assert place.exists()
    with unix_socket(place), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(place))


def test_a_file_is_never_removed(place: Path) -> None:
    place.parent.mkdir(mode=0o700)
    place.write_text("precious")
    with pytest.raises(ServerError, match="not a socket"), unix_socket(place):
        pass
    assert place.read_text() == "precious"


def test_a_link_is_not_followed(place: Path) -> None:
    place.parent.mkdir(mode=0o700)
    (place.parent / "precious").write_text("x")
    place.symlink_to("precious")
    with pytest.raises(ServerError, match="not a socket"), unix_socket(place):
        pass
    (place.parent / "api.sock.lock").unlink()
    (place.parent / "api.sock.lock").symlink_to("precious")
    with pytest.raises(ServerError, match="cannot lock"), unix_socket(place):
        pass


@pytest.mark.parametrize("permissions", [0o755, 0o711, 0o770, 0o707])
def test_a_directory_that_others_can_enter_is_refused(place: Path, permissions: int) -> None:
    place.parent.mkdir()
    place.parent.chmod(permissions)
    with pytest.raises(ServerError, match="is open to others"), unix_socket(place):
        pass


def test_long_paths_are_refused_with_the_reason(short_path: Path) -> None:
    rest = 103 - len(os.fsencode(short_path)) - len("//s")
    fits = short_path / ("d" * rest) / "s"
    assert len(os.fsencode(fits)) == 103
    with unix_socket(fits):
        pass
    with (
        pytest.raises(ServerError, match="can have 103 bytes, and this one has 104: give a shorter one with --socket or MLXINFER_SOCKET"),
        unix_socket(fits.with_name("ss")),
    ):
        pass


def test_a_port_that_is_taken() -> None:
    with tcp_socket("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ServerError, match=f"127.0.0.1:{port}: another program"):
            tcp_socket("127.0.0.1", port)


def test_an_address_that_is_none() -> None:
    with pytest.raises(ServerError, match="cannot listen"):
        tcp_socket("no.such.host.invalid", 0)


def test_both_at_once(place: Path) -> None:
    with listening(ServerSettings(socket=place, host="::1" if socket.has_ipv6 else "127.0.0.1", port=0)) as sockets:
        assert [s.family for s in sockets] == [socket.AF_UNIX, socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET]
    with pytest.raises(ServerError, match="nowhere to listen"):
        ServerSettings()


@pytest.mark.skipif(sys.platform != "linux", reason="systemd's way")
def test_sockets_from_systemd(place: Path) -> None:
    script = """
import os, socket
from mlxinfer.server.access.sockets import address, listening
from mlxinfer.server.settings import ServerSettings
os.environ["LISTEN_PID"] = str(os.getpid())
with listening(ServerSettings(activated=True)) as sockets:
    print(*map(address, sockets), os.get_inheritable(sockets[0].fileno()), "LISTEN_FDS" in os.environ)
"""
    with unix_socket(place) as listener:
        copy = os.dup(listener.fileno())
        program = f"import os, sys; os.dup2({copy}, 3); os.execv(sys.executable, [sys.executable, '-c', os.environ['SCRIPT']])"
        environment = {**os.environ, "LISTEN_FDS": "1", "SCRIPT": script}
        done = subprocess.run([sys.executable, "-c", program], env=environment, pass_fds=[copy], capture_output=True, text=True, check=True)
        os.close(copy)
    assert done.stdout.split() == [f"unix:{place}", "False", "False"]


@pytest.mark.parametrize(("host", "refused"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_a_socket_that_was_handed_over_needs_a_key_as_any_other(host: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in (None, "a long enough key"):
        monkeypatch.setattr(server_sockets, "passed_sockets", lambda: [tcp_socket(host, 0)])
        settings = ServerSettings(activated=True, api_key=key)
        if refused and key is None:
            with pytest.raises(ServerError, match="needs a key"), listening(settings):
                pass
        else:
            with listening(settings) as (listener,):
                assert listener.getsockname()[0] == host


@pytest.mark.skipif(sys.platform != "linux", reason="systemd's way")
def test_sockets_for_another_process_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_PID", str(os.getpid() + 1))
    monkeypatch.setenv("LISTEN_FDS", "1")
    with pytest.raises(ServerError, match="no sockets were handed over"):
        passed_sockets()


def test_the_kernel_says_who_is_there() -> None:
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        assert peer_uid(here) == os.geteuid()
    assert is_allowed(os.geteuid())
    assert is_allowed(0)
    assert not is_allowed(os.geteuid() + 1)
    assert not is_allowed(None)


def test_a_stranger_gets_no_answer(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    assert live.exchange(raw, unix=True)[0] == 200
    with monkeypatch.context() as patch:
        patch.setattr(server_connection, "peer_uid", lambda _: os.geteuid() + 1)
        with pytest.raises((ConnectionError, HTTPException)):
            live.exchange(raw, unix=True)
    assert live.exchange(raw, unix=True)[0] == 200


def test_nobody_is_told_to_close_a_directory_that_others_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    with pytest.raises(ServerError, match="open to others: put the socket in a folder of your own below it") as found:
        private_directory(shared)
    assert "chmod" not in str(found.value)
