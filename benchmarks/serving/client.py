"""A client that does as little as possible, so the measured time is the server's."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from time import perf_counter
from typing import Any

_EVENT = b"data: {"
_PATH = "/v1/completions"
_LEFT = 0.05
"""Fraction of a stream's pieces, at its end, that are read when they arrive. Before, the client sleeps while the socket collects."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds from connecting to: the first byte, the first piece of the answer, the last piece."""

    byte: float
    first: float
    last: float


def _request(body: dict[str, Any], port: int, *, close: bool) -> bytes:
    raw = json.dumps(body).encode()
    end = "close" if close else "keep-alive"
    head = f"POST {_PATH} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n"
    return f"{head}Connection: {end}\r\n\r\n".encode() + raw


async def stream(port: int, body: dict[str, Any], pieces: int) -> Times:
    """Read up to `pieces` pieces. Raises `ValueError` for a refused request."""
    loop = asyncio.get_running_loop()
    begun = perf_counter()
    byte = first = last = 0.0
    seen, rest = 0, b""
    with socket.socket() as connection:
        connection.setblocking(False)
        await loop.sock_connect(connection, ("127.0.0.1", port))
        await loop.sock_sendall(connection, _request(body | {"stream": True}, port, close=True))
        while part := await loop.sock_recv(connection, 1 << 20):
            now = perf_counter() - begun
            byte = byte or now
            rest += part
            found = rest.count(_EVENT)
            if found and seen < pieces:
                first, last = first or now, now
                seen += found
            rest = rest[-len(_EVENT) + 1 :] if found else rest[-1000:]
            if 0 < seen < pieces * (1 - _LEFT):
                await asyncio.sleep((last - first) / seen * (pieces - seen) / 2)
    if not seen:
        raise ValueError(f"no answer but {rest!r}")
    return Times(byte, first, last)


async def step(port: int, bodies: Sequence[dict[str, Any]], pieces: int) -> float:
    """Seconds between two pieces of a stream, for all streams at once."""
    found = await asyncio.gather(*(stream(port, body, pieces) for body in bodies))
    return mean((times.last - times.first) / (pieces - 1) for times in found)


async def whole(port: int, bodies: Sequence[dict[str, Any]], connections: int) -> float:
    """Seconds for all requests, over connections that are reused where the server allows it."""
    waiting = iter(bodies)
    begun = perf_counter()
    await asyncio.gather(*(_connection(port, waiting) for _ in range(connections)))
    return perf_counter() - begun


async def _connection(port: int, waiting: Any) -> None:
    reader: asyncio.StreamReader | None = None
    writer: asyncio.StreamWriter | None = None
    for body in waiting:
        if reader is None or writer is None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_request(body, port, close=False))
        if not await _answer(reader):
            writer.close()
            reader = writer = None
    if writer is not None:
        writer.close()


async def _answer(reader: asyncio.StreamReader) -> bool:
    """Read one answer. Returns True if the connection can be reused. Raises `ValueError` for a refused request."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    version, status, *_ = head.split(" ", 2)
    headers = {name.lower(): value.strip().lower() for name, _, value in (line.partition(":") for line in head.split("\r\n")[1:])}
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    elif headers.get("transfer-encoding") == "chunked":
        body = await reader.readuntil(b"0\r\n\r\n")
    else:
        body = await reader.read()
        headers["connection"] = "close"
    if status != "200":
        raise ValueError(body.decode(errors="replace")[:300])
    return version == "HTTP/1.1" and headers.get("connection") != "close"


if __name__ == "__main__":
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(asyncio.run(step(**job))), flush=True)
