"""The OpenAPI document, made from the routes and the types of their bodies and answers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from .._version import __version__
from .routing import Call, Doc, Endpoint, Server

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


def routes(server: Server, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
    written = document(endpoints)

    async def openapi(call: Call, body: Any) -> ASGIApp:
        return JSONResponse(written)

    return [Endpoint("GET", "/openapi.json", openapi, None, Doc("This document", dict[str, Any]), server=server)]
