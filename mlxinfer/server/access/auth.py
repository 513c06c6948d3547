"""Checks of each request before its content is parsed: Host, Origin, key, and the size and type of the body."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping

from starlette.types import Receive, Scope

from .. import page
from ..errors import APIError, invalid
from ..settings import Limits, ServerSettings, is_loopback
from ..sse import ClientGone
from .origins import Origins
from .own_names import WILDCARDS, own_names

PUBLIC = frozenset({"/health", *page.PATHS})
"""Paths that need no key. A supervisor can wait for the server, and a browser can open the page before it has the key."""
_DISCARDED = 4
"""An oversized body is read and discarded up to this multiple of the limit. Most clients read no response before they have sent the whole
body."""
_UNDECLARED_TYPES = frozenset({b"", b"application/x-www-form-urlencoded"})
"""Content types that curl and HTTP libraries send by default."""


class Auth:
    """Accepts or refuses requests by their headers.

    A web page must not reach the server through its user's browser. On TCP, the Host must be one of the server's own names, or the
    address at which the connection arrived: this stops DNS rebinding. An Origin, which only browsers send, must be the server itself or
    one of `allowed_origins`. Web pages cannot reach Unix sockets, so any Origin is refused there. A Unix socket needs no key, because
    the system reports the user who connects.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._header_bytes = settings.limits.header_bytes
        self._key = (settings.api_key or "").encode()
        self._origins = Origins(settings.allowed_origins)
        bound = [settings.host] if settings.host not in (None, *WILDCARDS) else []
        names = ("localhost", "127.0.0.1", "[::1]", *bound, *own_names(settings), *settings.allowed_hosts)
        self._hosts = frozenset(_bracketed(name.lower()) for name in names if name)

    def check(self, scope: Scope) -> None:
        """Raise `APIError` if the request is refused."""
        # h11 limits only headers that have not arrived completely.
        if sum(len(name) + len(value) for name, value in scope["headers"]) + len(scope["raw_path"]) > self._header_bytes:
            raise APIError(431, "too_large", f"The headers are longer than {self._header_bytes} bytes.", code="request_too_large")
        headers = _headers(scope)
        if b"transfer-encoding" in headers and (b"content-length" in headers or scope["http_version"] == "1.0"):
            # RFC 9112, 6.1: a proxy may have used the other length, and the rest of the body could be a smuggled request.
            raise APIError(400, "invalid", "Transfer-Encoding excludes Content-Length.", code="ambiguous_length")
        if is_unix(scope):
            if b"origin" in headers:
                raise APIError(403, "permission", "Web pages may not use this socket.", code="origin_not_allowed")
            return
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if (name := _without_port(host)) not in self._hosts and not (self._key and name == _came_to(scope)):
            message = "The Host of the request is not one of this server's names (serve --allowed-host NAME adds one)."
            raise APIError(403, "permission", message, code="host_not_allowed")
        origin = headers.get(b"origin", b"http://" + host.encode("latin-1")).decode("latin-1").lower()
        if origin != f"http://{host}" and not self._origins.allows(origin):
            message = "This origin is not allowed (serve --allowed-origin ORIGIN allows one)."
            raise APIError(403, "permission", message, code="origin_not_allowed")
        if self._origins.preflight(scope) is not None:
            return
        if self._key and scope["path"] not in PUBLIC:
            self._check_key(headers)

    def _check_key(self, headers: Mapping[bytes, bytes]) -> None:
        given = _given_key(headers)
        if not given:
            raise APIError(401, "authentication", "An API key is needed: send it as Authorization: Bearer.", code="missing_api_key")
        if not secrets.compare_digest(given, self._key):
            raise APIError(401, "authentication", "Incorrect API key provided.", code="invalid_api_key")


def has_key(headers: Mapping[bytes, bytes], settings: ServerSettings) -> bool:
    """True if a request over TCP has the server's key."""
    return secrets.compare_digest(_given_key(headers), (settings.api_key or "").encode())


def _given_key(headers: Mapping[bytes, bytes]) -> bytes:
    """The key in a request; empty if the request has none."""
    kind, _, token = headers.get(b"authorization", b"").partition(b" ")
    return token.strip() if kind.lower() == b"bearer" else headers.get(b"x-api-key", b"")


def is_unix(scope: Scope) -> bool:
    """True if the request came over a Unix socket, where the system has checked the client's user."""
    return bool(scope.get("state", {}).get("unix", False))


def peer(scope: Scope) -> str:
    """An identifier of the client: a process on a Unix socket, a connection from this machine, or another machine. A process may have
    several connections, but over TCP the server cannot tell which local process has a connection."""
    state = scope.get("state", {})
    if state.get("unix", False):
        return f"process {state.get('pid')}"
    host, port = scope.get("client") or ("", 0)
    return f"connection {port}" if is_loopback(host) else f"address {host}"


async def read_json(scope: Scope, receive: Receive, limits: Limits, *, any_type: bool = False) -> bytes:
    """The body of a request that must be JSON.

    `any_type` also accepts the content types that curl and HTTP libraries send by default. Web pages can send these types to another
    site, but never without an Origin, which `Auth` checks. Raises `APIError` for another type, for a body that is too long, and for a
    body that takes too long.
    """
    headers = _headers(scope)
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json" and not (any_type and kind in _UNDECLARED_TYPES):
        raise APIError(415, "invalid", "The body must be JSON: send Content-Type: application/json.", code="unsupported_media_type")
    if headers.get(b"content-encoding", b"identity") != b"identity":
        raise APIError(415, "invalid", "Compressed bodies are not supported.", code="unsupported_media_type")
    length = headers.get(b"content-length", b"0")
    declared = int(length) if length.isdigit() else 0
    if declared > limits.body_bytes and b"expect" in headers:
        raise too_large(limits.body_bytes)
    try:
        return await asyncio.wait_for(_read(receive, limits, declared), limits.body_s)
    except asyncio.TimeoutError:
        raise APIError(408, "timeout", f"The body did not arrive within {limits.body_s:g} s.", code="timeout") from None


async def _read(receive: Receive, limits: Limits, declared: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    if declared > _DISCARDED * limits.body_bytes:
        raise too_large(limits.body_bytes)
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > _DISCARDED * limits.body_bytes:
            raise too_large(limits.body_bytes)
        parts.append(part)
        if size > limits.body_bytes:
            parts.clear()
        if not message.get("more_body", False):
            break
    if size > limits.body_bytes:
        raise too_large(limits.body_bytes)
    body = b"".join(parts)
    if not body:
        raise invalid("The body is empty: send a JSON object.", code="invalid_json")
    return body


def too_large(most: int) -> APIError:
    """413: the body has more than `most` bytes."""
    return APIError(413, "too_large", f"The body is longer than {most} bytes.", code="request_too_large")


def _came_to(scope: Scope) -> str:
    """This machine's address at which the connection arrived, as in a Host header. No web page can have this address as its own name."""
    host = (scope.get("server") or ("",))[0] or ""
    return _bracketed(str(host).partition("%")[0])


def _headers(scope: Scope) -> dict[bytes, bytes]:
    """The last header of each name. h11 refuses a second Host."""
    return dict(scope["headers"])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() and port.isascii() else host
