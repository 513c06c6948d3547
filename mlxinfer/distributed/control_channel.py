"""A TCP connection between rank 0 and another rank, next to the ring: what is said there arrives even if the ring is stuck."""

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
"""Seconds between two signs of life."""
SILENCE_S = 1.5
"""After so many seconds without one the other side counts as stalled."""
_FIRST_S = 5.0
"""Seconds that the first one may take longer: ranks are not joined at the same moment."""
HEADER = struct.Struct("<BI")
"""Kind and length of a frame, before it."""
_MOST = 1 << 28


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 0
    """Who a rank is, and what it has: JSON."""
    PLAN = 1
    """What each rank is to do: JSON."""
    LIMITS = 2
    """What a rank has room for: JSON."""
    LOADED = 3
    """A rank has read its weights: JSON."""
    GO = 4
    """All have: the ring begins."""
    REFUSED = 5
    """A line for people: the rank, or the plan, does not fit."""
    STEPS = 6
    """What `messages.Journal` has collected."""
    BEAT = 7
    """A sign of life."""
    END = 8
    """The group ends, without a fault."""


class Link:
    """One end of a connection. Frames may be sent from several threads, and received by one."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(connection)  # before the group is joined there are no other signs of life: loading takes as long as it takes
        self._socket = connection
        self._lock = Lock()
        self.sent_bytes = 0
        """Bytes that were sent, signs of life included."""
        self.heard = monotonic()
        """When the last frame came, in seconds of `monotonic`."""

    @classmethod
    def connect(cls, address: tuple[str, int], timeout_s: float) -> Link:
        """Raises OSError where nobody listens."""
        return cls(socket.create_connection(address, timeout_s))

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Raises OSError where the other side has gone."""
        frame = HEADER.pack(kind, len(payload)) + payload
        with self._lock:
            self._socket.sendall(frame)
            self.sent_bytes += len(frame)

    def tell(self, kind: Kind, value: dict[str, Any]) -> None:
        """`send` JSON."""
        self.send(kind, json.dumps(value).encode())

    def receive(self) -> tuple[Kind, bytes]:
        """The next frame. Raises OSError where the other side has gone."""
        number, size = HEADER.unpack(self._read(HEADER.size))
        if number > max(Kind) or size > _MOST:
            raise ConnectionError("this is not spoken here")
        payload = self._read(size)
        self.heard = monotonic()
        return Kind(number), payload

    def expect(self, wanted: Kind) -> dict[str, Any]:
        """The next frame that is no sign of life, which must be of this kind: its JSON. Raises `NodesError` if the other side refuses, and
        OSError if it has gone."""
        kind, payload = self.receive()
        while kind is Kind.BEAT:
            kind, payload = self.receive()
        if kind is Kind.REFUSED:
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
    """A socket that listens there. Raises `NodesError`, which says `otherwise` and why."""
    try:
        return socket.create_server((address, port))
    except (OSError, OverflowError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        raise NodesError(f"{otherwise} at {address}:{port}: {reason}; its address is the one in the hostfile") from None


class Pulse:
    """Sends signs of life to other ranks, and listens for theirs, in threads of its own. Once one of them is silent or gone, `lost` is
    called with its place in `links` and the reason; never twice."""

    def __init__(
        self,
        links: list[Link],
        lost: Callable[[int, str], None],
        take: Callable[[Kind, bytes], None] = lambda kind, payload: None,
        silence_s: float = SILENCE_S,
    ) -> None:
        """`take` is called with every frame but signs of life, in a thread."""
        self._links, self._lost, self._take, self._silence_s = links, lost, take, silence_s
        self._over = Event()
        self._gate = Lock()
        for link in links:
            link.heard = monotonic() + _FIRST_S
        for place in range(len(links)):
            Thread(target=self._listen, args=(place,), name="mlxinfer link", daemon=True).start()
        Thread(target=self._beat, name="mlxinfer beat", daemon=True).start()
        Thread(target=self._watch, name="mlxinfer watch", daemon=True).start()

    def stop(self) -> None:
        """Call `lost` no more."""
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
                kind, payload = self._links[place].receive()
                if kind is Kind.END:
                    self.stop()
                if kind is not Kind.BEAT:
                    self._take(kind, payload)
        except OSError:
            self._end(place, "has ended")

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            for link in self._links:
                with suppress(OSError):  # `_listen` hears of it
                    link.send(Kind.BEAT)

    def _watch(self) -> None:
        """Apart from `_beat`, which may have to wait until a stalled rank reads."""
        while not self._over.wait(BEAT_S):
            for place, link in enumerate(self._links):
                if monotonic() - link.heard > self._silence_s:
                    self._end(place, f"has not been heard of for {self._silence_s:g} s")
