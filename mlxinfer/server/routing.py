"""A route that knows what goes in and what comes out: enough to check a request, and to write the OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from .fields import Body
from .guard import read_json
from .metrics import Metrics
from .models import Registry
from .problems import Problem, of_validation
from .settings import ServerSettings


@dataclass(frozen=True, slots=True)
class Server:
    """What every dialect works on."""

    models: Registry
    settings: ServerSettings
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class Call:
    """One request on its way. `path`: the variables of the route. `receive` tells when the client has gone. What is put in `log` goes to
    the access log: never any text of a prompt or an answer."""

    server: Server
    id: str
    receive: Receive
    path: Mapping[str, str] = field(default_factory=dict)
    headers: Headers = field(default_factory=Headers)
    log: dict[str, Any] = field(default_factory=dict)


Handler = Callable[[Call, Any], Awaitable[ASGIApp]]


@dataclass(frozen=True, slots=True)
class Doc:
    """`answer`: the type of the answer's JSON, or its media type. `streams`: the media type of the answer in pieces."""

    summary: str
    answer: Any
    streams: str | None = None
    statuses: tuple[int, ...] = ()


class Endpoint(Route):
    """`handler(call, body)` gives the response; it and the response may raise `Problem`. `body` is None for what has none; `unsaid` is
    that of `read_json`."""

    def __init__(
        self, method: str, path: str, handler: Handler, body: type[Body] | None, doc: Doc, *, server: Server, unsaid: bool = False
    ) -> None:
        super().__init__(path, _Handled(path, handler, body, server, unsaid), methods=[method])
        self.method = method
        self.shown = shown(path)
        self.body = body
        self.doc = doc


def shown(path: str) -> str:
    """`/models/{name:path}` as documents and counters have it."""
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", path)


class _Handled:
    def __init__(self, path: str, handler: Handler, body: type[Body] | None, server: Server, unsaid: bool) -> None:
        self._path = shown(path)
        self._handler = handler
        self._body = body
        self._server = server
        self._unsaid = unsaid

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        state["route"] = self._path
        body = None
        if self._body is not None:
            raw = await read_json(scope, receive, self._server.settings.limits, unsaid=self._unsaid)
            try:
                body = self._body.model_validate_json(raw)
            except ValidationError as error:
                raise of_validation(error) from None
        call = Call(self._server, state["request_id"], receive, scope["path_params"], Headers(scope=scope), state["log"])
        response = await self._handler(call, body)
        await response(scope, receive, send)


@dataclass(frozen=True, slots=True)
class Dialect:
    """An API's routes, and the shape of its errors for every path that begins like one of `prefixes`."""

    name: str
    prefixes: tuple[str, ...]
    routes: Callable[[Server], list[Endpoint]]
    render: Callable[[Problem], Response]

    def claims(self, path: str) -> bool:
        return path.startswith(self.prefixes)
