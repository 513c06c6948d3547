"""Origins of web pages and browser-based apps that may use the server, and the CORS headers for their browsers
(https://fetch.spec.whatwg.org/#http-cors-protocol)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from starlette.responses import Response
from starlette.types import Scope

from ...errors import ServerError

_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([^/*\s]+|\*)", re.ASCII)
_WEB = ("http", "https")
_MAX_AGE_S = 600
"""Seconds for which a browser caches the answer to a preflight."""


def checked_origin(origin: str) -> str:
    """The origin in lower case. Raises `ServerError` for text that is not an origin, and for an origin that covers the whole web."""
    found = _ORIGIN.fullmatch(origin.lower().rstrip("/"))
    if found is None:
        raise ServerError(f"{origin!r} is no origin: give it as in https://app.example, http://localhost:3000 or tauri://localhost")
    if found[2] == "*" and found[1] in _WEB:
        raise ServerError(f"{origin!r} would let in every web page: name the origins one by one")
    return found[0]


class Origins:
    """Origins that are accepted besides the server's own. An origin that ends in `*`, such as `vscode-webview://*`, covers a whole
    scheme."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self._exact = frozenset(origin for origin in allowed if not origin.endswith("*"))
        self._schemes = tuple(origin[:-1] for origin in allowed if origin.endswith("*"))

    def allows(self, origin: str) -> bool:
        """True if pages of this origin may use the server."""
        return origin.lower() in self._exact or bool(self._schemes and origin.lower().startswith(self._schemes))

    def headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """Headers that make the browser pass a response to the page."""
        origin = dict(scope["headers"]).get(b"origin", b"")
        if not origin or not self.allows(origin.decode("latin-1")):
            return []
        return [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", b"x-request-id"), (b"vary", b"origin")]

    def preflight(self, scope: Scope) -> Response | None:
        """The response to a CORS preflight; None for any other request. A preflight needs no key, because browsers send none with it."""
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        if scope["method"] != "OPTIONS" or b"access-control-request-method" not in headers or not self.headers(scope):
            return None
        answer = {"access-control-allow-methods": "GET, POST", "access-control-max-age": str(_MAX_AGE_S)}
        if b"access-control-request-headers" in headers:
            answer["access-control-allow-headers"] = headers[b"access-control-request-headers"].decode("latin-1")
        if b"access-control-request-private-network" in headers:
            answer["access-control-allow-private-network"] = "true"
        return Response(status_code=204, headers=answer)
