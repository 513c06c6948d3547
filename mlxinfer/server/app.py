"""The ASGI application: every dialect's routes behind one guard."""

from __future__ import annotations

import time
import uuid
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import TypedDict

from .._version import __version__
from ..errors import MLXInferError
from . import anthropic, log, ollama, openai
from .auth import Auth, is_unix
from .errors import APIError, of_error
from .metrics import Metrics
from .models import Registry
from .routing import Dialect, Doc, Endpoint, RequestContext, Server, document_routes
from .settings import ServerSettings
from .sse import ClientGone


class Health(TypedDict):
    status: str
    version: str
    models: list[str]


async def health(call: RequestContext, body: Any) -> ASGIApp:
    names = [served.name for served in call.server.models]
    failed = [served.name for served in call.server.models if served.llm.ended]
    status = f"{', '.join(failed)} has failed" if failed else "ok"
    return JSONResponse(Health(status=status, version=__version__, models=names), 503 if failed else 200)


async def metrics(call: RequestContext, body: Any) -> ASGIApp:
    return Response(generate_latest(call.server.metrics.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def health_routes(server: Server) -> list[Endpoint]:
    return [
        Endpoint("GET", "/health", health, None, Doc("Answers as soon as every model is loaded", Health), server=server),
        Endpoint("GET", "/metrics", metrics, None, Doc("Counters for Prometheus", "text/plain"), server=server),
    ]


DIALECTS: tuple[Dialect, ...] = (anthropic.DIALECT, ollama.DIALECT, openai.DIALECT)
"""The first that claims a path renders its errors; the last claims all."""

CLIENT_GONE = 499


def create_app(models: Registry, settings: ServerSettings) -> ASGIApp:
    """Serve these models. The engines are the caller's to start and to close."""
    server = Server(models, settings, Metrics(models))
    endpoints = [*(route for dialect in DIALECTS for route in dialect.routes(server)), *health_routes(server)]
    return _App(server, Router([*endpoints, *document_routes(server, endpoints)], redirect_slashes=False))


class _App:
    """Gives each request an id, lets the guard and the routes work, renders what they raise, writes the access log."""

    def __init__(self, server: Server, router: Router) -> None:
        self._server = server
        self._router = router
        self._guard = Auth(server.settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"only HTTP is served, not {scope['type']}")
        exchange = _Exchange(scope, send)
        try:
            self._guard.check(scope)
            await self._router(scope, receive, exchange.send)
        except APIError as problem:
            await self._refuse(problem, scope, receive, exchange)
        except HTTPException as error:
            await self._refuse(_of_routing(error, scope), scope, receive, exchange)
        except MLXInferError as error:
            await self._refuse(of_error(error), scope, receive, exchange)
        except ClientGone:
            exchange.status = CLIENT_GONE
        except Exception:
            await self._refuse(APIError(500, "internal", "The server failed.", code="internal_error"), scope, receive, exchange)
            raise
        finally:
            exchange.finish(self._server)

    async def _refuse(self, problem: APIError, scope: Scope, receive: Receive, exchange: _Exchange) -> None:
        if exchange.status:
            return
        exchange.log["error"] = problem.code or problem.kind
        dialect = next(dialect for dialect in DIALECTS if dialect.claims(scope["path"]))
        response = dialect.render(problem)
        response.headers.update(problem.headers)
        await response(scope, receive, exchange.send)


class _Exchange:
    """One request and its response, for the log and the counters."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._began = time.monotonic()
        self.status = 0
        self.log: dict[str, Any] = {}
        self.id = uuid.uuid4().hex
        scope["app"] = self
        scope["state"] = {**scope.get("state", {}), "request_id": self.id, "log": self.log}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *((name, self.id.encode()) for name in _ID_HEADERS)]
        await self._send(message)

    def finish(self, server: Server) -> None:
        scope, state = self._scope, self._scope["state"]
        # A path that is no route's may hold anything, so it is not repeated.
        route = state.get("route", "unknown")
        client = scope.get("client")
        who = f"uid {state.get('uid')}" if is_unix(scope) else client[0] if client else ""
        milliseconds = round((time.monotonic() - self._began) * 1000, 1)
        method = scope["method"] if scope["method"] in _METHODS else "other"
        server.metrics.answered(method, route, self.status)
        log.access(
            {"request_id": self.id, "client": who, "method": method, "route": route, "status": self.status, "ms": milliseconds, **self.log}
        )


_ID_HEADERS = (b"x-request-id", b"request-id")
"""As OpenAI's clients look for it, and as Anthropic's do."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def _of_routing(error: HTTPException, scope: Scope) -> APIError:
    if error.status_code == 405:
        return APIError(405, "invalid", "This path does not take this method.", code="method_not_allowed")
    return APIError(404, "not_found", "There is nothing at this path.", code="unknown_url")
