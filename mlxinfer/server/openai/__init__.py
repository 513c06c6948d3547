"""OpenAI's API: chat completions, completions, responses and models (https://platform.openai.com/docs/api-reference)."""

from __future__ import annotations

from ..routing import Dialect, Endpoint, Server
from . import chat, completions, models, responses
from .protocol import error_response


def _routes(server: Server) -> list[Endpoint]:
    return [route for part in (chat, completions, responses, models) for route in part.routes(server)]


DIALECT = Dialect(name="openai", prefixes=("",), routes=_routes, error_response=error_response)
