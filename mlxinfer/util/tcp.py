"""TCP connections that notice when the other machine has gone without a word."""

from __future__ import annotations

import socket

_OPTIONS = {"TCP_KEEPIDLE": 15, "TCP_KEEPALIVE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""After 15 seconds of silence (which Linux and macOS name differently) the system asks every 5 seconds whether the other machine is still
there, and gives up after 3 times."""


def keep_alive(connection: socket.socket) -> None:
    """Have a connection fail half a minute after the other machine has gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
