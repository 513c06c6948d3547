"""OpenAI's API (https://platform.openai.com/docs/api-reference): chat completions, completions, responses, embeddings and models. Also
reranking and tokenizing, which OpenAI does not have."""

from __future__ import annotations

from ..routing import Dialect, Endpoint, Server
from . import adapters, chat, completions, embeddings, models, reranking, responses
from .protocol import error_response


def _routes(server: Server) -> list[Endpoint]:
    parts = (chat, completions, responses, embeddings, reranking, models, adapters)
    return [route for part in parts for route in part.routes(server)]


DIALECT = Dialect(name="openai", prefixes=("",), routes=_routes, error_response=error_response)
