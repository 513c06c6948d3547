"""A route that knows what goes in and what comes out: enough to check a request, and to write the OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from .._version import __version__
from .auth import read_json
from .errors import APIError, of_validation
from .metrics import Metrics
from .models import Registry
from .settings import ServerSettings
from .validation import StrictModel


@dataclass(frozen=True, slots=True)
class Server:
    """What every dialect works on."""

    models: Registry
    settings: ServerSettings
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One request on its way. `path`: the variables of the route. `receive` tells when the client has gone. What is put in `log` goes to
    the access log: never any text of a prompt or an answer."""

    server: Server
    id: str
    receive: Receive
    path: Mapping[str, str] = field(default_factory=dict)
    headers: Headers = field(default_factory=Headers)
    log: dict[str, Any] = field(default_factory=dict)


Handler = Callable[[RequestContext, Any], Awaitable[ASGIApp]]


@dataclass(frozen=True, slots=True)
class Doc:
    """`answer`: the type of the answer's JSON, or its media type. `streams`: the media type of the answer in pieces."""

    summary: str
    answer: Any
    streams: str | None = None
    statuses: tuple[int, ...] = ()


class Endpoint(Route):
    """`handler(call, body)` gives the response; it and the response may raise `APIError`. `body` is None for what has none; `unsaid` is
    that of `read_json`."""

    def __init__(
        self, method: str, path: str, handler: Handler, body: type[StrictModel] | None, doc: Doc, *, server: Server, unsaid: bool = False
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
    def __init__(self, path: str, handler: Handler, body: type[StrictModel] | None, server: Server, unsaid: bool) -> None:
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
        call = RequestContext(self._server, state["request_id"], receive, scope["path_params"], Headers(scope=scope), state["log"])
        response = await self._handler(call, body)
        await response(scope, receive, send)


@dataclass(frozen=True, slots=True)
class Dialect:
    """An API's routes, and the shape of its errors for every path that begins like one of `prefixes`."""

    name: str
    prefixes: tuple[str, ...]
    routes: Callable[[Server], list[Endpoint]]
    render: Callable[[APIError], Response]

    def claims(self, path: str) -> bool:
        return path.startswith(self.prefixes)


_REF = "#/components/schemas/{model}"
REFUSALS = (400, 401, 403, 404, 405, 408, 413, 415, 429, 431, 500, 503)

Schemas = Mapping[Any, dict[str, Any]]
"""By type."""


def document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """OpenAPI 3.1."""
    schemas, components = _schemas(endpoints)
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.shown, {})[endpoint.method.lower()] = _operation(endpoint, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlxinfer", "version": __version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _schemas(endpoints: Iterable[Endpoint]) -> tuple[Schemas, dict[str, Any]]:
    """Of bodies and answers, and what they refer to. All are made at once: dialects have types of the same name."""
    bodies = [endpoint.body for endpoint in endpoints if endpoint.body]
    answers = [endpoint.doc.answer for endpoint in endpoints if not isinstance(endpoint.doc.answer, str)]
    inputs = [(number, "validation", TypeAdapter(body)) for number, body in enumerate(bodies)]
    outputs = [(number, "serialization", TypeAdapter(answer)) for number, answer in enumerate(answers, len(bodies))]
    made, definitions = TypeAdapter.json_schemas([*inputs, *outputs], ref_template=_REF)  # type: ignore[list-item]
    by_number = {number: schema for (number, _), schema in made.items()}
    return {kind: by_number[number] for number, kind in enumerate([*bodies, *answers])}, definitions.get("$defs", {})


def _operation(endpoint: Endpoint, schemas: Schemas) -> dict[str, Any]:
    doc = endpoint.doc
    content: dict[str, Any] = {doc.answer: {"schema": {"type": "string"}}} if isinstance(doc.answer, str) else _json(schemas[doc.answer])
    if doc.streams:
        content[doc.streams.partition(";")[0]] = {}  # a schema would be that of each event
    statuses = (REFUSALS if endpoint.body else tuple(s for s in REFUSALS if s not in (408, 413, 415))) + doc.statuses
    operation: dict[str, Any] = {
        "summary": doc.summary,
        "responses": {"200": {"description": "OK", "content": content}} | {str(s): {"description": "Refused"} for s in statuses},
    }
    if endpoint.body:
        operation["requestBody"] = {"required": True, "content": _json(schemas[endpoint.body])}
    if names := re.findall(r"\{(\w+)\}", endpoint.shown):
        operation["parameters"] = [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names]
    return operation


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def document_routes(server: Server, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
    written = document(endpoints)

    async def openapi(call: RequestContext, body: Any) -> ASGIApp:
        return JSONResponse(written)

    return [Endpoint("GET", "/openapi.json", openapi, None, Doc("This document", dict[str, Any]), server=server)]
