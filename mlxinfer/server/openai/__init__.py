"""OpenAI's API: chat completions, completions, responses and models."""

from __future__ import annotations

from ..routing import Dialect, Endpoint, Server
from . import chat, models
from .errors import render

DIALECT = Dialect(name="openai", prefixes=("",), routes=lambda server: _routes(server), render=render)


def _routes(server: Server) -> list[Endpoint]:
    return [route for part in (chat, models) for route in part.routes(server)]
