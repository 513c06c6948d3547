"""Ollama's API for using models (https://docs.ollama.com/api), without the endpoints that pull, create and delete models."""

from __future__ import annotations

from ..routing import Dialect, Endpoint, Server
from . import embeddings, generate, models
from .protocol import error_response


def _routes(server: Server) -> list[Endpoint]:
    return [route for part in (generate, embeddings, models) for route in part.routes(server)]


DIALECT = Dialect(name="ollama", prefixes=("/api/",), routes=_routes, error_response=error_response)
