"""One connection of uvicorn's, with what uvicorn does not do: the user at the other end, and a time limit for headers."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from .peers import peer_uid, welcome
from .settings import Limits


class Connection(H11Protocol):
    """Tells the application in `scope["state"]` whether the socket is a Unix one and who connected (`unix`, `uid`), and lets it drop the
    connection at once (`abort`)."""

    limits = Limits()

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._deadline: asyncio.TimerHandle | None = None
        self._seen: object = None

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
        self.app_state = {**self.app_state, **state}
        if len(self.connections) > self.limits.connections:
            transport.abort()
            return
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._wait_for_request()

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
