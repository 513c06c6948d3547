"""The page's files, and their HTTP headers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

FOLDER = Path(__file__).parent / "static"
PREFIX = "/page/"
INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""The page may load from and connect to this server only. Browsers with trusted types also refuse to parse any text as HTML
(https://www.w3.org/TR/CSP3/, https://www.w3.org/TR/trusted-types/)."""
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # browsers revalidate each time, and usually get 304
}


def _files() -> list[Path]:
    """The page's own files, and the libraries that it loads when they are needed."""
    return sorted(path for path in FOLDER.rglob("*") if path.suffix in _TYPES)


def _address(path: Path) -> str:
    return PREFIX + path.relative_to(FOLDER).as_posix()


@dataclass(frozen=True, slots=True)
class PageFile:
    path: str
    """URL path."""
    content: bytes
    headers: dict[str, str]
    """Headers of every response with this file."""

    @classmethod
    def read(cls, path: Path) -> PageFile:
        """Read a file. It is served at its path below `/page/`, and the index at `/`."""
        content = path.read_bytes()
        own = {"content-type": _TYPES[path.suffix], "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
        index = path.name == INDEX
        return cls("/" if index else _address(path), content, _HEADERS | own | ({"vary": "accept"} if index else {}))

    def answer(self, known: str) -> Response:
        """The response with the file, or 304 if the client has it. `known` is the request's `If-None-Match`."""
        tags = {tag.strip().removeprefix("W/") for tag in known.split(",")}
        if self.headers["etag"] in tags or "*" in tags:
            return Response(status_code=304, headers=self.headers)
        return Response(self.content, headers=self.headers)


class PageRoute(Route):
    """Serves a file. The index is served only to clients that accept HTML: Ollama's clients get another response at `/`."""

    def __init__(self, file: PageFile) -> None:
        super().__init__(file.path, self.serve, methods=["GET"])
        self.app = self.serve
        self._file = file

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if self.path == "/" and b"text/html" not in dict(scope.get("headers", ())).get(b"accept", b""):
            return Match.NONE, {}
        return super().matches(scope)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file."""
        scope["state"]["route"] = self.path
        known = dict(scope["headers"]).get(b"if-none-match", b"").decode("latin-1")
        await self._file.answer(known)(scope, receive, send)


def routes() -> list[PageRoute]:
    """The routes of all files."""
    return [PageRoute(PageFile.read(path)) for path in _files()]


PATHS = frozenset({"/", *(_address(path) for path in _files() if path.name != INDEX)})
"""Paths of the files. They need no key: they have no secret, and a browser that opens the page cannot send one."""
