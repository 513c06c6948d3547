"""One connection of uvicorn's, with what uvicorn does not do: the user at the other end, and a time limit for headers."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol

from .settings import Limits
from .sockets import peer_uid, welcome

_NO_HTTP = {"error": {"message": "This is no valid HTTP request.", "type": "invalid_request_error", "param": None, "code": "invalid_http"}}
_NO_HTTP_BODY = json.dumps(_NO_HTTP).encode()
_NO_HTTP_HEADERS = [
    (b"content-type", b"application/json"),
    (b"content-length", str(len(_NO_HTTP_BODY)).encode()),
    (b"connection", b"close"),
]


class Connection(H11Protocol):
    """Tells the application in `scope["state"]` whether the socket is a Unix one and who connected (`unix`, `uid`), and lets it drop the
    connection at once (`abort`)."""

    limits = Limits()

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._deadline: asyncio.TimerHandle | None = None
        self._seen: object = None
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection: socket.socket = transport.get_extra_info("socket")
        state: dict[str, Any] = {"unix": connection.family == socket.AF_UNIX, "abort": transport.abort}
        if state["unix"]:
            try:
                state["uid"] = peer_uid(connection)
            except OSError:
                state["uid"] = None
            if not welcome(state["uid"]):
                transport.abort()
                return
        else:
            # asyncio does so only where the listener names its protocol; else what is sent in two pieces waits 40 ms for the first.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.app_state = {**self.app_state, **state}
        if len(self.connections) > self.limits.connections:
            transport.abort()
            return
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._deadline, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Uvicorn stops reading when the next request comes before its turn, and would not see that the client goes."""
        super().handle_events()
        if self.flow.read_paused and self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) < HIGH_WATER_LIMIT:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._must_read()
        else:
            self._wait_for_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._must_read()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None and not self.transport.is_closing():
            self._stalled.cancel()
            self._stalled = None

    def _must_read(self) -> None:
        """Whatever is on its way to the client has so much time: a transport that closes would wait for ever."""
        if self._stalled is None:
            self._stalled = self.loop.call_later(self.limits.write_s, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """For what is no HTTP. Behind the beginning of an answer there is no place for another one."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            events = (h11.Response(status_code=400, headers=_NO_HTTP_HEADERS), h11.Data(data=_NO_HTTP_BODY), h11.EndOfMessage())
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()
        self._must_read()

    def _should_upgrade(self) -> bool:
        return False

    def _wait_for_request(self) -> None:
        """Uvicorn's own limit ends with the first byte of a request; this one with the last of its headers."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._seen = self.cycle
        self._deadline = self.loop.call_later(self.limits.header_s, self._check_progress)

    def _check_progress(self) -> None:
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self.cycle is self._seen and not self.transport.is_closing():
            self.transport.abort()


def connection_class(limits: Limits) -> type[Connection]:
    return type("LimitedConnection", (Connection,), {"limits": limits})
