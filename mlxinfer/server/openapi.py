"""The OpenAPI document, made from the routes and the types of their bodies and answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import models_json_schema
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from .._version import __version__
from .fields import Body
from .routing import Call, Doc, Endpoint, Server

_REF = "#/components/schemas/{model}"
REFUSALS = (400, 401, 403, 404, 405, 408, 413, 415, 429, 431, 500, 503)


def document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """OpenAPI 3.1."""
    bodies: list[type[Body]] = list(dict.fromkeys(e.body for e in endpoints if e.body))
    _, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF)
    components: dict[str, Any] = schemas.get("$defs", {})
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        path = endpoint.shown
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, path, components)
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlxinfer", "version": __version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(endpoint: Endpoint, path: str, components: dict[str, Any]) -> dict[str, Any]:
    doc = endpoint.doc
    content = {doc.answer: {"schema": {"type": "string"}}} if isinstance(doc.answer, str) else _json(doc.answer, components)
    if doc.streams:
        content[doc.streams.partition(";")[0]] = {"schema": {"type": "string"}}
    statuses = REFUSALS if endpoint.body else tuple(s for s in REFUSALS if s not in (408, 413, 415))
    statuses += doc.statuses
    operation: dict[str, Any] = {
        "summary": doc.summary,
        "responses": {"200": {"description": "OK", "content": content}} | {str(s): {"description": "Refused"} for s in statuses},
    }
    if endpoint.body:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{endpoint.body.__name__}"}}},
        }
    if names := re.findall(r"\{(\w+)\}", path):
        operation["parameters"] = [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names]
    return operation


def _json(answer: Any, components: dict[str, Any]) -> dict[str, Any]:
    schema = TypeAdapter(answer).json_schema(ref_template=_REF, mode="serialization")
    components |= schema.pop("$defs", {})
    return {"application/json": {"schema": schema}}


def routes(server: Server, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
    written = document(endpoints)

    async def openapi(call: Call, body: Any) -> ASGIApp:
        return JSONResponse(written)

    return [Endpoint("GET", "/openapi.json", openapi, None, Doc("This document", dict[str, Any]), server=server)]
