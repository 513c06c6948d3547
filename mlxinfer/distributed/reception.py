"""Accepts connections at rank 0, from anybody: no connection blocks the others, and little is read before a rank is known."""

from __future__ import annotations

import json
import selectors
import socket
from time import monotonic
from typing import Any

from .control_channel import HEADER, FrameKind

HELLO_S = 5.0
"""Seconds for the first message of a connection."""
MAX_PENDING = 64
"""Maximum connections without a complete first message; beyond it, the oldest is closed."""
MAX_HELLO_BYTES = 64 * 1024
"""Maximum bytes of the first message."""


class _PendingConnection:
    def __init__(self, connection: socket.socket, until: float) -> None:
        self.connection = connection
        self.until = until
        self.heard = bytearray()

    def hello(self) -> dict[str, Any] | None:
        """Return the first message, or None while it is incomplete. Raises `ValueError` for a malformed one, and OSError."""
        part = self.connection.recv(HEADER.size + MAX_HELLO_BYTES - len(self.heard))
        if not part:
            raise ConnectionError("the connection was closed")
        self.heard += part
        if len(self.heard) < HEADER.size:
            return None
        kind, size = HEADER.unpack_from(self.heard)
        if kind != FrameKind.HELLO or size > MAX_HELLO_BYTES:
            raise ValueError("this is not spoken here")
        if len(self.heard) < HEADER.size + size:
            return None
        told = json.loads(self.heard[HEADER.size : HEADER.size + size])
        if not isinstance(told, dict):
            raise ValueError("this is not spoken here")
        return told


class Reception:
    """Reads the first message of any number of connections at once."""

    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self._pending: dict[int, _PendingConnection] = {}
        """By descriptor, oldest first."""
        self._watched = selectors.DefaultSelector()
        server.setblocking(False)
        self._watched.register(server, selectors.EVENT_READ)

    def next(self) -> tuple[socket.socket, dict[str, Any] | Exception]:
        """Return the next connection with its first message, or with the error in it."""
        while True:
            now = monotonic()
            late = next((each for each in self._pending.values() if each.until <= now), None)
            if late is not None:
                return self._taken(late), TimeoutError("timed out")
            wait = min((each.until - now for each in self._pending.values()), default=None)
            for key, _ in self._watched.select(wait):
                pending = self._pending.get(key.fd)
                if pending is None:
                    self._accept()
                    continue
                try:
                    told = pending.hello()
                except BlockingIOError:
                    continue
                except (OSError, ValueError, RecursionError) as error:
                    return self._taken(pending), error
                if told is not None:
                    return self._taken(pending), told

    def close(self) -> None:
        """Close all connections without a complete first message."""
        for pending in list(self._pending.values()):
            self._taken(pending).close()
        self._watched.close()

    def _accept(self) -> None:
        oldest = next(iter(self._pending.values()), None)
        try:
            connection, _ = self._server.accept()
        except OSError:  # the client has disconnected, or no descriptors are left
            if oldest is not None:
                self._taken(oldest).close()
            return
        connection.setblocking(False)
        if oldest is not None and len(self._pending) >= MAX_PENDING:
            self._taken(oldest).close()
        self._pending[connection.fileno()] = _PendingConnection(connection, monotonic() + HELLO_S)
        self._watched.register(connection, selectors.EVENT_READ)

    def _taken(self, pending: _PendingConnection) -> socket.socket:
        self._watched.unregister(pending.connection)
        del self._pending[pending.connection.fileno()]
        pending.connection.setblocking(True)
        return pending.connection
