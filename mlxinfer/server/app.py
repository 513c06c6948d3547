"""The ASGI application: endpoints of all dialects, authorization before each request, and a log line after it."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from threading import Event
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import NotRequired, TypedDict

from .._version import __version__
from ..errors import MLXInferError
from . import anthropic, log, ollama, openai, page
from .access.auth import Auth, has_key, is_unix
from .access.origins import Origins
from .errors import APIError, from_engine_error, server_failed, stopping
from .metrics import Metrics, WithVLLMNames
from .model_manager.manager import ModelManager
from .model_manager.registry import Registry
from .routers import introspection, kv_transfer
from .routing import Dialect, Doc, Endpoint, RequestContext, Server, document_routes
from .settings import ServerSettings
from .shared.images import PictureQueue
from .sse import ClientGone

DIALECTS: tuple[Dialect, ...] = (anthropic.DIALECT, ollama.DIALECT, openai.DIALECT)
"""The first dialect that claims a path renders its errors. The last dialect claims every path."""

CLIENT_GONE = 499
"""nginx's status for a request whose client has disconnected. It is logged and counted, but not sent."""
_ID_HEADERS = (b"x-request-id", b"request-id")
"""Header names that OpenAI's and Anthropic's clients read."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_SIMILARITY = 0.85
"""Least similarity of a misspelled path to a known path, from 0 to 1."""


def create_app(
    models: Registry,
    manager: ModelManager,
    settings: ServerSettings,
    dialects: Sequence[Dialect] | None = None,
    draining: Event | None = None,
) -> ASGIApp:
    """An application that serves these models in these dialects (default: `DIALECTS`). The caller closes the manager. While the caller
    keeps `draining` set, `/health` returns 503, so that routers choose another server."""
    dialects = DIALECTS if dialects is None else dialects
    limits = settings.limits
    pictures = PictureQueue(limits.picture_requests, limits.picture_queue)
    server = Server(models, manager, settings, Metrics(models, manager), draining or Event(), pictures)
    endpoints = [*(endpoint for dialect in dialects for endpoint in dialect.routes(server)), *_own_routes(server)]
    return _App(server, dialects, Router([*page.routes(), *endpoints, *document_routes(server, endpoints)], redirect_slashes=False))


class _App:
    """Gives each request an id, authorizes and routes it, renders its errors, and writes the access log."""

    def __init__(self, server: Server, dialects: Sequence[Dialect], router: Router) -> None:
        self._server = server
        self._dialects = dialects
        self._router = router
        self._auth = Auth(server.settings)
        self._origins = Origins(server.settings.allowed_origins)
        self._paths = KnownPaths(route.path for route in router.routes if isinstance(route, Route))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"only HTTP is served, not {scope['type']}")
        exchange = _Exchange(scope, send, [] if is_unix(scope) else self._origins.headers(scope))
        try:
            self._auth.check(scope)
            await (self._origins.preflight(scope) or self._router)(scope, receive, exchange.send)
        except APIError as error:
            await self._refuse(error, scope, receive, exchange)
        except HTTPException as error:
            await self._refuse(self._of_routing(error, scope["path"], exchange), scope, receive, exchange, self._allowed(scope["path"]))
        except MLXInferError as error:
            await self._refuse(from_engine_error(error), scope, receive, exchange)
        except ClientGone:
            exchange.status = CLIENT_GONE
        except asyncio.CancelledError:  # the server stops, and waits until its requests are answered
            await self._refuse(stopping(), scope, receive, exchange)
        except Exception:
            await self._refuse(server_failed(), scope, receive, exchange)
            raise
        finally:
            exchange.finish(self._server)

    async def _refuse(self, error: APIError, scope: Scope, receive: Receive, exchange: _Exchange, methods: Sequence[str] = ()) -> None:
        if exchange.status:
            return  # the response has started
        exchange.log["error"] = error.code or error.kind
        dialect = next(dialect for dialect in self._dialects if dialect.claims(scope["path"]))
        response = dialect.error_response(error)
        response.headers.update(error.headers | ({"allow": ", ".join(methods)} if error.status == 405 else {}))
        await response(scope, receive, exchange.send)

    def _allowed(self, path: str) -> list[str]:
        """Methods of the routes at this path (RFC 9110, 15.5.6)."""
        routes = (route for route in self._router.routes if isinstance(route, Route) and route.path_regex.match(path))
        return sorted({method for route in routes for method in route.methods or ()})

    def _of_routing(self, error: HTTPException, path: str, exchange: _Exchange) -> APIError:
        if error.status_code == 405:
            exchange.log["path"] = self._paths.shown(path)
            use = " or ".join(method for method in self._allowed(path) if method != "HEAD")
            return APIError(405, "invalid", f"Use {use}.", code="method_not_allowed")
        exchange.log["path"] = self._paths.shown(path)
        near = self._paths.near(path)
        hint = f": did you mean {near}?" if near else "."
        return APIError(404, "not_found", f"There is nothing at this path{hint}", code="unknown_url")


class KnownPaths:
    """The paths of all endpoints: suggests one for an unknown path, and removes private text from paths for the log."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._known = {path: _path_parts(path) for path in paths if "{" not in path and path != "/"}
        self._words = frozenset(part for parts in self._known.values() for part in parts)

    def near(self, path: str) -> str | None:
        """The endpoint that a client with a wrong base URL means, or None.

        The endpoint that shares the most parts at the end, as `/chat/completions` or `/v1/v1/chat/completions` share them with
        `/v1/chat/completions`; otherwise an endpoint with a similar spelling.
        """
        parts = _path_parts(path)
        found = max(self._known, key=lambda known: (_common_end(self._known[known], parts), -len(known)), default="")
        if found and _common_end(self._known[found], parts):
            return found
        return next(iter(get_close_matches("/" + "/".join(parts), self._known, 1, _SIMILARITY)), None)

    def shown(self, path: str) -> str:
        """The path with an asterisk for every part that no endpoint has: such a part may be a text or a key."""
        return "/" + "/".join(part if part in self._words or not part else "*" for part in path[1:].split("/"))[:200]


def _path_parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def _common_end(one: list[str], other: list[str]) -> int:
    """Number of equal parts at the end of both paths."""
    count = 0
    for a, b in zip(reversed(one), reversed(other), strict=False):
        if a != b:
            break
        count += 1
    return count


class _Exchange:
    """A request and its response, for the access log and the counters."""

    def __init__(self, scope: Scope, send: Send, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self._scope = scope
        self._send = send
        self._headers = headers
        self._began = time.monotonic()
        self.status = 0
        """HTTP status; 0 until the response starts."""
        self.log: dict[str, Any] = {}
        """More fields for the access log."""
        self.id = uuid.uuid4().hex
        scope["app"] = self
        scope["state"] = {**scope.get("state", {}), "request_id": self.id, "log": self.log}

    async def send(self, message: Message) -> None:
        """ASGI's `send`; adds the request's id and the CORS headers."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            ids = [(name, self.id.encode()) for name in _ID_HEADERS]
            message["headers"] = [*message.get("headers", ()), *ids, *self._headers]
        await self._send(message)

    def finish(self, server: Server) -> None:
        """Write the log line and count the request."""
        scope, state = self._scope, self._scope["state"]
        # A path without an endpoint may have private text, so neither the log nor the counters repeat it.
        route = state.get("route", "unknown")
        peer = scope.get("client")
        client = f"uid {state.get('uid')}" if is_unix(scope) else peer[0] if peer else ""
        milliseconds = round((time.monotonic() - self._began) * 1000, 1)
        method = scope["method"] if scope["method"] in _METHODS else "other"
        server.metrics.answered(method, route, self.status)
        log.access(
            {
                "request_id": self.id,
                "client": client,
                "method": method,
                "route": route,
                "status": self.status,
                "ms": milliseconds,
                **self.log,
            }
        )


class Health(TypedDict):
    """`states` maps each model to listed, loading, ready, unloading or failed. On a server with a key, a request without the key gets
    `status` only."""

    status: str
    version: str
    models: list[str]
    states: dict[str, str]
    process: NotRequired[int]
    """Id of the server's process, for clients of the Unix socket."""


async def health(context: RequestContext, _: Any) -> ASGIApp:
    models = context.server.models
    failed = [entry.name for entry in models if entry.slot.broken]
    status = f"{', '.join(failed)} has failed" if failed else "ok"
    states = {entry.name: entry.slot.state for entry in models}
    if context.server.draining.is_set():
        status = "draining"
    code = 200 if status == "ok" else 503
    if context.shared_key and not has_key(dict(context.headers.raw), context.server.settings):
        return JSONResponse(Health(status="failed" if failed and status != "draining" else status, version="", models=[], states={}), code)
    found = Health(status=status, version=__version__, models=list(states), states=dict(states))
    if context.on_unix_socket:
        found["process"] = os.getpid()
    return JSONResponse(found, code)


async def metrics(context: RequestContext, body: Any) -> ASGIApp:
    return Response(generate_latest(WithVLLMNames(context.server.metrics.registry)), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _own_routes(server: Server) -> list[Endpoint]:
    """Endpoints that belong to no dialect."""
    return [
        Endpoint("GET", "/health", health, None, Doc("Health of the server and states of its models", Health), server=server),
        Endpoint("GET", "/metrics", metrics, None, Doc("Counters for Prometheus", "text/plain"), server=server),
        *introspection.routes(server),
        *kv_transfer.routes(server),
    ]
