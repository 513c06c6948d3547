"""A model hub for tests: serves repositories from memory over the hub's own protocol, on a free local port."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

SHA = "0123456789abcdef0123456789abcdef01234567"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    repos: dict[str, dict[str, bytes]]
    requests: list[str]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        self.requests.append(f"{self.command} {self.path}")
        path, _, query = self.path.partition("?")
        status, headers, data = self._search(query) if path == "/api/models" else self._route(path)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), "X-Repo-Commit": SHA, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def _route(self, path: str) -> tuple[int, dict[str, str], bytes]:
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/([^/]+)", path):
            return self._info(match[1], match[2])
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+", path):
            files = self.repos[match[1]].items()
            listing = [{"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()} for name, data in files]
            return 200, {"Content-Type": "application/json"}, json.dumps(listing).encode()
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            data = self.repos[match[1]][match[2]]
            return 200, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"'}, data
        return 404, {}, b""

    def _search(self, query: str) -> tuple[int, dict[str, str], bytes]:
        """Answer `GET /api/models`: the hub finds repositories whose names contain the text. All of them count as MLX."""
        asked = parse_qs(query)
        text, library = asked["search"][0].lower(), asked["filter"][0]
        found = [{"id": repo, "downloads": 1} for repo in self.repos if text in repo.lower() and library == "mlx"]
        return 200, {"Content-Type": "application/json"}, json.dumps(found[: int(asked["limit"][0])]).encode()

    def _info(self, repo: str, revision: str) -> tuple[int, dict[str, str], bytes]:
        if repo == "org/gated":
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        if repo == "org/broken":
            return 500, {}, b""
        if repo not in self.repos:
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        if revision not in ("main", SHA):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        info = {"id": repo, "modelId": repo, "sha": SHA, "private": False, "tags": [], "downloads": 0, "siblings": []}
        return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def hub(repos: dict[str, dict[str, bytes]]) -> Iterator[tuple[str, list[str]]]:
    """Serve `{repo: {file: bytes}}`. Gives the endpoint, and a list to which each request is added."""
    requests: list[str] = []
    handler = type("Handler", (_Handler,), {"repos": repos, "requests": requests})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
