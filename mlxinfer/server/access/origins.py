"""Web pages and browser-based apps that may use the server: which origins, and the headers that their browser asks for
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
"""Seconds for which a browser need not ask again."""


def checked_origin(origin: str) -> str:
    """The origin in lower case. Raises `ServerError` for what is none, and for every page of the web at once."""
    found = _ORIGIN.fullmatch(origin.lower().rstrip("/"))
    if found is None:
        raise ServerError(f"{origin!r} is no origin: give it as in https://app.example, http://localhost:3000 or tauri://localhost")
    if found[2] == "*" and found[1] in _WEB:
        raise ServerError(f"{origin!r} would let in every web page: name the origins one by one")
    return found[0]


class Origins:
    """The origins that are let in besides the server's own. One that ends in `*`, as `vscode-webview://*`, stands for a whole scheme."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self._exact = frozenset(origin for origin in allowed if not origin.endswith("*"))
        self._schemes = tuple(origin[:-1] for origin in allowed if origin.endswith("*"))

    def allows(self, origin: str) -> bool:
        """Whether pages of this origin may use the server."""
        return origin.lower() in self._exact or bool(self._schemes and origin.lower().startswith(self._schemes))

    def headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """The headers of an answer by which the browser hands it to the page."""
        origin = dict(scope["headers"]).get(b"origin", b"")
        if not origin or not self.allows(origin.decode("latin-1")):
            return []
        return [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", b"x-request-id"), (b"vary", b"origin")]

    def preflight(self, scope: Scope) -> Response | None:
        """The answer to a browser that asks whether a page may send a request; None for any other request. It needs no key, because a
        browser sends none with it."""
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        if scope["method"] != "OPTIONS" or b"access-control-request-method" not in headers or not self.headers(scope):
            return None
        answer = {"access-control-allow-methods": "GET, POST", "access-control-max-age": str(_MAX_AGE_S)}
        if b"access-control-request-headers" in headers:
            answer["access-control-allow-headers"] = headers[b"access-control-request-headers"].decode("latin-1")
        if b"access-control-request-private-network" in headers:
            answer["access-control-allow-private-network"] = "true"
        return Response(status_code=204, headers=answer)
