"""Plays hostile requests to a server and watches what becomes of the connections."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..http.http_answers import statuses
from ..http.live_server import LiveServer
from .cases import Case, Deaf, HalfClose, Send, Vanish, Wait

TOGETHER = 48
"""Connections at once."""
_DECLARED = frozenset({100, 200, 400, 401, 403, 404, 405, 408, 413, 415, 429, 431})
_LEAKS = (b"Traceback", b"site-packages", b"root:x:", b'File "')


@dataclass
class Report:
    played: int = 0
    answered: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    longest_s: float = 0.0


async def play(live: LiveServer, cases: Iterable[Case], limit_s: float) -> Report:
    """Every connection has to be ended by the server, or have been left by the client, within `limit_s`."""
    report = Report()
    waiting = iter(cases)

    async def player() -> None:
        for case in waiting:
            await _play(live, case, limit_s, report)

    await asyncio.gather(*(player() for _ in range(TOGETHER)))
    return report


async def _play(live: LiveServer, case: Case, limit_s: float, report: Report) -> None:
    report.played += 1
    unix = report.played % 2 == 0
    sock = socket.socket(socket.AF_UNIX if unix else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    if any(isinstance(step, Deaf) for step in case.steps):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    begun = time.monotonic()
    received = bytearray()
    try:
        await asyncio.wait_for(_converse(live, sock, unix, case, received), limit_s)
        if not any(isinstance(step, Vanish) for step in case.steps):
            _judge(case, bytes(received), report)
    except (TimeoutError, asyncio.TimeoutError):
        report.faults.append(f"{case.name}: still open after {limit_s} s, {bytes(received[:200])!r}")
    finally:
        sock.close()
        report.longest_s = max(report.longest_s, time.monotonic() - begun)


async def _converse(live: LiveServer, sock: socket.socket, unix: bool, case: Case, received: bytearray) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, str(live.path) if unix else ("127.0.0.1", live.port))  # type: ignore[arg-type]
    deaf = any(isinstance(step, Deaf) for step in case.steps)
    reading = asyncio.ensure_future(_read(sock, received) if not deaf else asyncio.sleep(0))
    try:
        for step in case.steps:
            if isinstance(step, Send):
                await loop.sock_sendall(sock, step.data)
            elif isinstance(step, Wait):
                await asyncio.sleep(step.seconds)
            elif isinstance(step, HalfClose):
                sock.shutdown(socket.SHUT_WR)
            elif isinstance(step, Vanish):
                if step.reset and not unix:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return
            else:
                await _until_ended(sock)
        await reading
    except OSError:  # the server has ended it while something was sent
        if not deaf:
            await reading
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def _read(sock: socket.socket, received: bytearray) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            part = await loop.sock_recv(sock, 65536)
        except OSError:
            return
        if not part:
            return
        received += part


async def _until_ended(sock: socket.socket) -> None:
    """Does not read; sending fails once the server has closed the connection."""
    while True:
        sock.send(b"\r\n")
        await asyncio.sleep(0.05)


def _judge(case: Case, received: bytes, report: Report) -> None:
    try:
        answers = statuses(received, case.is_head)
    except ValueError as error:
        report.faults.append(f"{case.name}: {error}")
        return
    report.answered.update(status for status, _ in answers)
    for status, body in answers:
        if status not in _DECLARED:
            report.faults.append(f"{case.name}: {status} {body[:200]!r}")
        if any(leak in body for leak in _LEAKS):
            report.faults.append(f"{case.name}: tells too much, {body[:200]!r}")
        if status >= 400 and body and not _is_error(body):
            report.faults.append(f"{case.name}: {status} without an error, {body[:200]!r}")
    if sum(status != 100 for status, _ in answers) > case.answers:
        report.faults.append(f"{case.name}: {[status for status, _ in answers]} for {case.answers} requests")


def _is_error(body: bytes) -> bool:
    try:
        return bool(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return False
