"""Endpoints with declared request and response types: these check requests and generate the OpenAPI document."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from threading import Event
from typing import Any

from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from .._version import __version__
from . import sse
from .access.auth import is_unix, peer, read_json, too_large
from .errors import APIError, from_validation_error, timed_out
from .log import notice_once
from .metrics import Metrics
from .model_manager.manager import ModelManager
from .model_manager.model_slot import ModelSlot
from .model_manager.registry import ModelEntry, Registry, ServedModel
from .settings import Limits, ServerSettings
from .shared.images import PictureQueue
from .validation import StrictModel

_MAX_CLIENT_ID = 256
"""Characters; the engine's limit."""


@dataclass(frozen=True, slots=True)
class Server:
    """State shared by the endpoints of all dialects."""

    models: Registry
    manager: ModelManager
    settings: ServerSettings
    metrics: Metrics
    draining: Event = field(default_factory=Event)
    """Set while the server sends its last answers."""
    pictures: PictureQueue = field(default_factory=PictureQueue)
    """Requests whose images are decoded."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One HTTP request in progress."""

    server: Server
    id: str
    """32 hexadecimal digits, also in the response's `x-request-id` and in the access log."""
    receive: Receive
    """ASGI's `receive`; reports that the client has disconnected."""
    path: Mapping[str, str] = field(default_factory=dict)
    """Variables of the route, such as `model` of `/v1/models/{model}`."""
    headers: Headers = field(default_factory=Headers)
    log: dict[str, Any] = field(default_factory=dict)
    """More fields for the request's line in the access log. Never the text of a prompt or an answer."""
    peer: str = ""
    """Identifier of the sender, see `auth.peer`. Requests of different peers are scheduled fairly."""
    on_unix_socket: bool = False
    """True for a client on the Unix socket."""
    shared_key: bool = False
    """True if the client has sent the server's key, which other users may have too."""
    began: float = field(default_factory=time.monotonic)
    """Time of arrival on the clock `time.monotonic`."""
    held: list[ModelSlot] = field(default_factory=list)
    """Models in use, which stay loaded until the response has ended."""
    body_bytes: int = 0
    """Bytes of the body."""

    @property
    def limits(self) -> Limits:
        return self.server.settings.limits

    @property
    def left_s(self) -> float | None:
        """Seconds left for the answer; None means no limit."""
        most = self.limits.request_s
        return None if most is None else max(most - (time.monotonic() - self.began), 1e-3)

    def client_id(self, user: str) -> str:
        """The id for fair scheduling: the user that the request names, or else its peer."""
        return f"user {user}"[-_MAX_CLIENT_ID:] if user else self.peer

    async def model(self, name: str, keep_alive_s: float | None = None) -> ServedModel:
        """Load the model with this name if necessary, and use it until the response has ended. It stays loaded for `keep_alive_s`
        seconds afterwards. Raises `APIError`, and `ClientGone` if the client disconnects while waiting."""
        return await self.use(self.server.models.entry(name), keep_alive_s)

    async def use(self, entry: ModelEntry, keep_alive_s: float | None = None) -> ServedModel:
        """`model` for an entry that has been looked up."""
        manager, slot = self.server.manager, entry.slot
        self.log["model"] = entry.name
        if manager.try_acquire(slot, keep_alive_s):
            self.held.append(slot)
        else:
            asked = time.monotonic()
            try:
                await sse.unless_gone(self.receive, asyncio.wait_for(self._acquire(slot, keep_alive_s), self.left_s))
            except asyncio.TimeoutError:
                raise timed_out(self.limits.request_s) from None
            self.log["load_ms"] = round((time.monotonic() - asked) * 1000, 1)
        assert slot.llm is not None
        served = ServedModel(entry.name, slot.llm, entry.adapter)
        if self.body_bytes > self.limits.body_bytes and served.blind_reason is not None:
            raise too_large(self.limits.body_bytes)
        return served

    async def _acquire(self, slot: ModelSlot, keep_alive_s: float | None) -> None:
        await self.server.manager.acquire(slot, keep_alive_s)
        self.held.append(slot)

    def release(self) -> None:
        """End the use of all models."""
        while self.held:
            self.server.manager.release(self.held.pop())


Handler = Callable[[RequestContext, Any], Awaitable[ASGIApp]]
"""`handler(context, body)` returns the response. The handler, and the response while it is sent, may raise `APIError`."""


@dataclass(frozen=True, slots=True)
class Doc:
    """An endpoint's entry in the OpenAPI document."""

    summary: str
    answer: Any
    """Type of the response's JSON, or the media type of a response that is not JSON."""
    streams: str | None = None
    """Media type of the streamed response, if the endpoint can stream."""
    statuses: tuple[int, ...] = ()
    """Statuses of errors in addition to `REFUSALS`."""


class Endpoint(Route):
    """A method, a path, the handler of the requests, and the type of their bodies (None: no body).

    `any_type` accepts bodies that are not declared as JSON, see `read_json`. `images` accepts longer bodies for models that see images.
    """

    def __init__(
        self,
        method: str,
        path: str,
        handler: Handler,
        body: type[StrictModel] | None,
        doc: Doc,
        *,
        server: Server,
        any_type: bool = False,
        images: bool = False,
    ) -> None:
        super().__init__(path, handler, methods=[method])
        self.app = self.serve
        self.method = method
        self.body = body
        self.doc = doc
        self.documented_path = re.sub(r"\{(\w+):\w+\}", r"{\1}", path)
        """`/models/{name:path}` without the converter, for the OpenAPI document and the counters."""
        self._handler = handler
        self._server = server
        self._any_type = any_type
        self._images = images

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read and check the body, call the handler and send its response. Raises `APIError`."""
        state = scope["state"]
        state["route"] = self.documented_path
        context = RequestContext(
            self._server,
            state["request_id"],
            receive,
            scope["path_params"],
            Headers(scope=scope),
            state["log"],
            peer=peer(scope),
            on_unix_socket=is_unix(scope),
            shared_key=bool(self._server.settings.api_key) and not is_unix(scope),
        )
        try:
            # A body may have many megabytes. Only the handler keeps it.
            response = await self._handler(*(await self._arguments(context, scope)))
            await response(scope, receive, send)
        finally:
            context.release()

    async def _arguments(self, context: RequestContext, scope: Scope) -> tuple[RequestContext, Any]:
        """The handler's arguments: the context and the validated body, None for endpoints without one. Raises `APIError`."""
        if self.body is None:
            return context, None
        limits = context.limits
        if self._images and any(entry.may_see for entry in self._server.models):
            limits = replace(limits, body_bytes=max(limits.body_bytes, limits.image_body_bytes))
        raw = await read_json(scope, context.receive, limits, any_type=self._any_type)
        taken: dict[str, str] = {}
        try:
            body = self.body.model_validate_json(raw, context=taken)
        except ValidationError as error:
            raise from_validation_error(error) from None
        for name, why in taken.items():
            notice_once(f"{name} is taken without effect: {why}", route=self.documented_path)
        return replace(context, body_bytes=len(raw)), body


@dataclass(frozen=True, slots=True)
class Dialect:
    """An HTTP API: its endpoints, and the shape of its errors (docs/add-a-dialect.md)."""

    name: str
    """One lower-case word."""
    prefixes: tuple[str, ...]
    """This dialect renders errors on paths with one of these prefixes."""
    routes: Callable[[Server], list[Endpoint]]
    """Creates the endpoints of a server."""
    error_response: Callable[[APIError], Response]
    """Renders an error. The server adds the headers that the status requires."""

    def claims(self, path: str) -> bool:
        """True if this dialect renders errors on this path."""
        return path.startswith(self.prefixes)


REFUSALS = (400, 401, 403, 404, 405, 408, 413, 415, 429, 431, 500, 503)
"""Statuses of errors that every endpoint may return."""
_BODY_REFUSALS = (408, 413, 415)
_REF = "#/components/schemas/{model}"

Schemas = Mapping[Any, dict[str, Any]]


def document_routes(server: Server, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
    """`GET /openapi.json`. Generating the document takes a quarter of a second, so it is generated on the first request."""
    written = cache(lambda: document(endpoints))

    async def openapi(context: RequestContext, body: Any) -> ASGIApp:
        return JSONResponse(await asyncio.to_thread(written))

    return [Endpoint("GET", "/openapi.json", openapi, None, Doc("This document", dict[str, Any]), server=server)]


def document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The endpoints as OpenAPI 3.1 (https://spec.openapis.org/oas/v3.1.0)."""
    schemas, components = _schemas(endpoints)
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.documented_path, {})[endpoint.method.lower()] = _operation(endpoint, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlxinfer", "version": __version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _schemas(endpoints: Iterable[Endpoint]) -> tuple[Schemas, dict[str, Any]]:
    """Schemas of bodies and responses, and the components that the schemas refer to. One call generates all of them, so that types of
    different dialects with the same name get different components."""
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
        content[doc.streams.partition(";")[0]] = {}  # OpenAPI 3.1 has no schema for the events of a stream
    statuses = (REFUSALS if endpoint.body else tuple(s for s in REFUSALS if s not in _BODY_REFUSALS)) + doc.statuses
    operation: dict[str, Any] = {
        "summary": doc.summary,
        "responses": {"200": {"description": "OK", "content": content}} | {str(s): {"description": "Refused"} for s in statuses},
    }
    if endpoint.body:
        operation["requestBody"] = {"required": True, "content": _json(schemas[endpoint.body])}
    if names := re.findall(r"\{(\w+)\}", endpoint.documented_path):
        operation["parameters"] = [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names]
    return operation


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
