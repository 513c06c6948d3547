"""An uvicorn connection with three additions: the user who connects, time limits, and immediate notice of clients that disconnect.

Uvicorn has no public interface for this. `Connection` overrides methods of `H11Protocol` and reads some of its attributes. Therefore
pyproject.toml pins uvicorn's minor versions, and tests/server/access/test_connection_uvicorn.py lists the attributes in use.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..log import notice_once
from ..settings import Limits
from .sockets import is_allowed, peer_pid, peer_uid

_NOT_HTTP = {
    "error": {"message": "This is not a valid HTTP request.", "type": "invalid_request_error", "param": None, "code": "invalid_http"}
}
_NOT_HTTP_BODY = json.dumps(_NOT_HTTP).encode()
_NOT_HTTP_HEADERS = [
    (b"content-type", b"application/json"),
    (b"content-length", str(len(_NOT_HTTP_BODY)).encode()),
    (b"connection", b"close"),
]


class Connection(H11Protocol):
    """Adds to the application's `scope["state"]`: `unix` (True for a Unix socket), `uid` and `pid` (user and process at its other end) and
    `abort()` (drops the connection at once)."""

    limits = Limits()
    """Limits of the server; `connection_class` sets them."""
    open_by_kind: ClassVar[Counter[str]] = Counter()
    """Open connections on "TCP" and on the "Unix socket". Each kind has its own limit, so one full kind leaves the other usable."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._header_timer: asyncio.TimerHandle | None = None
        self._last_cycle: object = None
        """Uvicorn's request-response cycle when the header timer was set."""
        self._write_timer: asyncio.TimerHandle | None = None
        self._kind = ""
        """Key in `open_by_kind` while the connection is counted; otherwise empty."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection: socket.socket = transport.get_extra_info("socket")
        state: dict[str, Any] = {"unix": connection.family == socket.AF_UNIX, "abort": transport.abort}
        if state["unix"]:
            try:
                state["uid"], state["pid"] = peer_uid(connection), peer_pid(connection)
            except OSError:
                state["uid"] = None
            if not is_allowed(state["uid"]):
                transport.abort()
                return
        else:
            # asyncio sets this option only if the listener was made with an explicit protocol. Without this option, a second write waits
            # 40 ms for the acknowledgement of the first.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.app_state = {**self.app_state, **state}
        self._kind = "Unix socket" if state["unix"] else "TCP"
        self.open_by_kind[self._kind] += 1
        if self.open_by_kind[self._kind] > self.limits.connections:
            notice_once(f"{self.limits.connections} connections are open on {self._kind}, the limit: further ones are refused")
            transport.abort()
            return
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._kind:
            self.open_by_kind[self._kind] -= 1
            self._kind = ""
        for timer in (self._header_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Keep reading when a client pipelines a second request. Uvicorn pauses reading, and would not notice that the client
        disconnects."""
        super().handle_events()
        if self.flow.read_paused and self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) < HIGH_WATER_LIMIT:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._start_write_timer()
        else:
            self._start_header_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_write_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None and not self.transport.is_closing():
            self._write_timer.cancel()
            self._write_timer = None

    def _start_write_timer(self) -> None:
        """Limit the time for all bytes on their way to the client. Without a limit, a closing transport would wait for ever."""
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.limits.write_s, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Answer 400 to bytes that are not HTTP, unless a response has already started."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            events = (h11.Response(status_code=400, headers=_NOT_HTTP_HEADERS), h11.Data(data=_NOT_HTTP_BODY), h11.EndOfMessage())
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()
        self._start_write_timer()

    def _should_upgrade(self) -> bool:
        """Ignore `Upgrade`, without uvicorn's warning about a missing WebSocket library."""
        return False

    def _start_header_timer(self) -> None:
        """Limit the time until all headers have arrived. Uvicorn's own limit ends with their first byte."""
        if self._header_timer is not None:
            self._header_timer.cancel()
        self._last_cycle = self.cycle
        self._header_timer = self.loop.call_later(self.limits.header_s, self._check_progress)

    def _check_progress(self) -> None:
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self.cycle is self._last_cycle and not self.transport.is_closing():
            self.transport.abort()


def connection_class(limits: Limits) -> type[Connection]:
    """A subclass of `Connection` with these limits. Uvicorn creates connections itself and passes no arguments on."""
    return type("LimitedConnection", (Connection,), {"limits": limits, "open_by_kind": Counter()})
