"""TCP connection between rank 0 and another rank. It is separate from the ring, so messages arrive even if the ring is stuck."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any

from ..errors import NodesError
from ..util.tcp import keep_alive

BEAT_S = 0.25
"""Seconds between two heartbeats."""
SILENCE_S = 1.5
"""A rank counts as stalled after this many seconds without a frame."""
_FIRST_S = 5.0
"""Additional seconds before the first heartbeat, as ranks do not join at the same moment."""
HEADER = struct.Struct("<BI")
"""Frame header: kind and payload length."""
_MOST = 1 << 28


class FrameKind(IntEnum):
    HELLO = 0
    """Identity of a rank: `Hello` as JSON."""
    PLAN = 1
    """`Orders` as JSON."""
    LIMITS = 2
    """`RankLimits` as JSON."""
    LOADED = 3
    """A rank has read its weights; byte counts as JSON."""
    GO = 4
    """All ranks have read their weights: the ring starts."""
    REFUSED = 5
    """Refusal of a rank or of a plan; one line for people."""
    STEPS = 6
    """Output of `messages.MessageBuffer.take`."""
    BEAT = 7
    END = 8
    """Regular end of the group."""


class ControlChannel:
    """One end of a connection. Several threads may send, one may receive."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(connection)  # loading may take long and sends no heartbeats
        self._socket = connection
        self._lock = Lock()
        self.sent_bytes = 0
        """Bytes sent, including heartbeats."""
        self.heard = monotonic()
        """Time of the last frame, in seconds of `monotonic`."""

    @classmethod
    def connect(cls, address: tuple[str, int], timeout_s: float) -> ControlChannel:
        """Connect to `address`. Raises OSError if nothing listens there."""
        return cls(socket.create_connection(address, timeout_s))

    def send(self, kind: FrameKind, payload: bytes = b"") -> None:
        """Send one frame. Raises OSError if the connection is lost."""
        frame = HEADER.pack(kind, len(payload)) + payload
        with self._lock:
            self._socket.sendall(frame)
            self.sent_bytes += len(frame)

    def send_json(self, kind: FrameKind, value: dict[str, Any]) -> None:
        self.send(kind, json.dumps(value).encode())

    def receive(self) -> tuple[FrameKind, bytes]:
        """Return the next frame. Raises OSError if the connection is lost."""
        number, size = HEADER.unpack(self._read(HEADER.size))
        if number > max(FrameKind) or size > _MOST:
            raise ConnectionError("this is not spoken here")
        payload = self._read(size)
        self.heard = monotonic()
        return FrameKind(number), payload

    def expect(self, wanted: FrameKind) -> dict[str, Any]:
        """Return the JSON of the next frame that is not a heartbeat; its kind must be `wanted`.

        Raises `NodesError` if the other side refuses, and OSError if the connection is lost.
        """
        kind, payload = self.receive()
        while kind is FrameKind.BEAT:
            kind, payload = self.receive()
        if kind is FrameKind.REFUSED:
            raise NodesError(payload.decode(errors="replace"))
        if kind is not wanted:
            raise ConnectionError(f"{wanted.name} was expected, not {kind.name}")
        return dict(json.loads(payload)) if payload else {}

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self._socket.recv(size - len(parts))
            if not part:
                raise ConnectionError("the connection was closed")
            parts += part
        return bytes(parts)


def listen(address: str, port: int, otherwise: str) -> socket.socket:
    """Return a listening socket. Raises `NodesError` with `otherwise` and the reason."""
    try:
        return socket.create_server((address, port))
    except (OSError, OverflowError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        raise NodesError(f"{otherwise} at {address}:{port}: {reason}; its address is the one in the hostfile") from None


class Heartbeat:
    """Threads that send heartbeats to other ranks and watch for theirs.

    `lost` is called at most once, with the index in `channels` and the reason.
    """

    def __init__(
        self,
        channels: list[ControlChannel],
        lost: Callable[[int, str], None],
        take: Callable[[FrameKind, bytes], None] = lambda kind, payload: None,
        silence_s: float = SILENCE_S,
    ) -> None:
        """`take` is called in a thread with every frame that is not a heartbeat."""
        self._channels, self._lost, self._take, self._silence_s = channels, lost, take, silence_s
        self._over = Event()
        self._gate = Lock()
        for channel in channels:
            channel.heard = monotonic() + _FIRST_S
        for place in range(len(channels)):
            Thread(target=self._listen, args=(place,), name="mlxinfer link", daemon=True).start()
        Thread(target=self._beat, name="mlxinfer beat", daemon=True).start()
        Thread(target=self._watch, name="mlxinfer watch", daemon=True).start()

    def stop(self) -> None:
        """Disable `lost`."""
        with self._gate:
            self._over.set()

    def _end(self, place: int, reason: str) -> None:
        with self._gate:
            if self._over.is_set():
                return
            self._over.set()
        self._lost(place, reason)

    def _listen(self, place: int) -> None:
        try:
            while True:
                kind, payload = self._channels[place].receive()
                if kind is FrameKind.END:
                    self.stop()
                if kind is not FrameKind.BEAT:
                    self._take(kind, payload)
        except OSError:
            self._end(place, "has ended")

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            for channel in self._channels:
                with suppress(OSError):  # `_listen` notices the loss
                    channel.send(FrameKind.BEAT)

    def _watch(self) -> None:
        """Check for silence, in a thread of its own: `_beat` blocks while a stalled rank does not read."""
        while not self._over.wait(BEAT_S):
            for place, channel in enumerate(self._channels):
                if monotonic() - channel.heard > self._silence_s:
                    self._end(place, f"has not been heard of for {self._silence_s:g} s")
