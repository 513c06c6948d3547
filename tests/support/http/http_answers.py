"""Parsing of HTTP answers in the bytes of a connection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def statuses(received: bytes, is_head: bool = False) -> Sequence[tuple[int, bytes]]:
    """(status, body) of every answer in the bytes of a connection. The last answer may be cut off. Raises `ValueError` for bytes that
    are not HTTP."""
    found = []
    while received:
        head, end, rest = received.partition(b"\r\n\r\n")
        if not end:
            break
        line, *lines = head.split(b"\r\n")
        version, status, *_ = line.split(b" ")
        if version != b"HTTP/1.1":
            raise ValueError(f"no answer: {line[:80]!r}")
        headers = {name.lower(): value.strip() for name, _, value in (each.partition(b":") for each in lines)}
        body, received = (b"", rest) if is_head or status == b"100" else _body(headers, rest)
        found.append((int(status), body))
    return found


def _body(headers: Mapping[bytes, bytes], rest: bytes) -> tuple[bytes, bytes]:
    if b"content-length" in headers:
        size = int(headers[b"content-length"])
        return rest[:size], rest[size:]
    if headers.get(b"transfer-encoding") != b"chunked":
        return rest, b""
    body = b""
    while rest:
        size_line, end, rest = rest.partition(b"\r\n")
        if not end:
            return body, b""
        size = int(size_line, 16)
        body += rest[:size]
        rest = rest[size + 2 :]
        if not size:
            break
    return body, rest
