"""Keep-alive settings of TCP connections, which detect a peer that disappeared."""

from __future__ import annotations

import socket

_OPTIONS = {"TCP_KEEPIDLE": 15, "TCP_KEEPALIVE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Probe after 15 seconds of silence, whose option Linux and macOS name differently, every 5 seconds, at most 3 times."""


def keep_alive(connection: socket.socket) -> None:
    """Let a connection fail 30 seconds after its peer disappeared."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
