"""HTTP with a running server, over its Unix socket or TCP. Standard library only, since a short answer must not wait for imports."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...errors import ContextLengthError, ModelNotFoundError, PromptError, ServerError
from ...util.cache_dir import default_socket

_CONNECT_S = 5.0
_LENGTHS = re.compile(r"length is (\d+) tokens.*?has (\d+) tokens")


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        try:
            self.sock.connect(str(self._path))
        except OSError:
            self.sock.close()
            raise


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Address of a server."""

    url: str | None = None
    """`http://HOST:PORT`; None is the Unix socket of this user's server."""

    def __str__(self) -> str:
        return self.url or str(default_socket())

    def open(self) -> http.client.HTTPConnection:
        """Return a new connection. Raises `OSError` if no server listens, and `ServerError` for an address that is not a URL."""
        if self.url is None:
            connection: http.client.HTTPConnection = _UnixConnection(default_socket())
        else:
            connection = _tcp(self.url)
        connection.connect()
        if connection.sock is not None:
            connection.sock.settimeout(None)  # an answer may take long
        return connection

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request, and return the JSON of its answer. Raises `OSError` without a server, and `MLXInferError` for its errors."""
        with closing(self.open()) as connection:
            return self._read(self._send(connection, method, path, body))

    def health(self) -> Any:
        """Return the JSON of `/health`, also of a server that has failed. Raises as `ask`."""
        with closing(self.open()) as connection:
            return self._read(self._send(connection, "GET", "/health", None, accepted=503))

    def events(self, path: str, body: Any) -> Generator[dict[str, Any], None, None]:
        """Yield the server-sent events of an answer. Closing the generator cancels the request. Raises as `ask`."""
        with closing(self.open()) as connection:
            response = self._send(connection, "POST", path, body)
            if response.headers.get_content_type() != "text/event-stream":
                raise ServerError(f"the server at {self} answers without a stream")
            try:
                for line in response:
                    if not line.startswith(b"data: "):
                        continue
                    if line.startswith(b"data: [DONE]"):
                        return
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise _error(event["error"])
                    yield event
            except (OSError, http.client.HTTPException, ValueError):
                pass
            raise ServerError(f"the server at {self} ended before the answer was complete")

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any, *, accepted: int = 200
    ) -> http.client.HTTPResponse:
        headers = {"content-type": "application/json"}
        if self.url is not None and (key := os.environ.get("MLXINFER_API_KEY")):
            headers["authorization"] = f"Bearer {key}"
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
        except http.client.HTTPException:
            raise ServerError(f"{self} is not a model server: name another address with --url") from None
        if response.status == 401:
            raise ServerError(f"the server at {self} refuses the key in $MLXINFER_API_KEY")
        if response.status >= 400 and response.status != accepted:
            found = self._read(response)
            raise _error(found.get("error") if isinstance(found, dict) else None)
        return response

    def _read(self, response: http.client.HTTPResponse) -> Any:
        try:
            return json.loads(response.read())
        except (ValueError, http.client.HTTPException):
            raise ServerError(f"{self} is not a model server: name another address with --url") from None


def _tcp(url: str) -> http.client.HTTPConnection:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if parts.scheme not in ("http", "https") or not host:
        raise ServerError(f"--url takes an address such as http://127.0.0.1:8080, not {url!r}")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(host, port, timeout=_CONNECT_S)


def _error(found: Any) -> Exception:
    """Return the exception for an error object of OpenAI's API, or for Ollama's text."""
    details = found if isinstance(found, dict) else {"message": found}
    message, code, kind = str(details.get("message")), details.get("code"), details.get("type")
    lengths = _LENGTHS.search(message)
    if code == "context_length_exceeded" and lengths:
        return ContextLengthError(message, int(lengths[2]), int(lengths[1]))
    if code == "model_not_found":
        return ModelNotFoundError(message)
    return PromptError(message) if kind == "invalid_request_error" else ServerError(message)
