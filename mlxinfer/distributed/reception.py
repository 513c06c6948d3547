"""Reception of connections at rank 0. Anybody may connect: rank 0 waits for no single stranger, and reads little before it knows a rank."""

from __future__ import annotations

import json
import selectors
import socket
from time import monotonic
from typing import Any

from .control_channel import HEADER, Kind

HELLO_S = 5.0
"""Seconds that a connection has to say who it is."""
MOST_STRANGERS = 64
"""Connections that have not said who they are; beyond, the oldest goes."""
LONGEST_HELLO = 64 * 1024
"""Bytes of what a rank says first."""


class _Stranger:
    def __init__(self, connection: socket.socket, until: float) -> None:
        self.connection = connection
        self.until = until
        self.heard = bytearray()

    def hello(self) -> dict[str, Any] | None:
        """Return the message, or None while some of it is missing. Raises `ValueError` for what no rank says, and OSError."""
        part = self.connection.recv(HEADER.size + LONGEST_HELLO - len(self.heard))
        if not part:
            raise ConnectionError("the connection was closed")
        self.heard += part
        if len(self.heard) < HEADER.size:
            return None
        kind, size = HEADER.unpack_from(self.heard)
        if kind != Kind.HELLO or size > LONGEST_HELLO:
            raise ValueError("this is not spoken here")
        if len(self.heard) < HEADER.size + size:
            return None
        told = json.loads(self.heard[HEADER.size : HEADER.size + size])
        if not isinstance(told, dict):
            raise ValueError("this is not spoken here")
        return told


class Reception:
    """Connections to a listening socket until each has said who it is, any number at once."""

    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self._strangers: dict[int, _Stranger] = {}
        """By their descriptors, the oldest first."""
        self._watched = selectors.DefaultSelector()
        server.setblocking(False)
        self._watched.register(server, selectors.EVENT_READ)

    def next(self) -> tuple[socket.socket, dict[str, Any] | Exception]:
        """The next connection that has said who it is, or what is wrong with what it said."""
        while True:
            now = monotonic()
            late = next((each for each in self._strangers.values() if each.until <= now), None)
            if late is not None:
                return self._taken(late), TimeoutError("timed out")
            wait = min((each.until - now for each in self._strangers.values()), default=None)
            for key, _ in self._watched.select(wait):
                stranger = self._strangers.get(key.fd)
                if stranger is None:
                    self._accept()
                    continue
                try:
                    told = stranger.hello()
                except BlockingIOError:
                    continue
                except (OSError, ValueError, RecursionError) as error:
                    return self._taken(stranger), error
                if told is not None:
                    return self._taken(stranger), told

    def close(self) -> None:
        """Leave all that have not said who they are."""
        for stranger in list(self._strangers.values()):
            self._taken(stranger).close()
        self._watched.close()

    def _accept(self) -> None:
        oldest = next(iter(self._strangers.values()), None)
        try:
            connection, _ = self._server.accept()
        except OSError:  # it has left, or there are no descriptors for it
            if oldest is not None:
                self._taken(oldest).close()
            return
        connection.setblocking(False)
        if oldest is not None and len(self._strangers) >= MOST_STRANGERS:
            self._taken(oldest).close()
        self._strangers[connection.fileno()] = _Stranger(connection, monotonic() + HELLO_S)
        self._watched.register(connection, selectors.EVENT_READ)

    def _taken(self, stranger: _Stranger) -> socket.socket:
        self._watched.unregister(stranger.connection)
        del self._strangers[stranger.connection.fileno()]
        stranger.connection.setblocking(True)
        return stranger.connection
