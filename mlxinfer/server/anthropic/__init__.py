"""Anthropic's API: messages, and how many tokens they are."""

from __future__ import annotations

from ..routing import Dialect, Endpoint, Server
from . import count_tokens, messages
from .errors import render


def _routes(server: Server) -> list[Endpoint]:
    return [route for part in (messages, count_tokens) for route in part.routes(server)]


DIALECT = Dialect(name="anthropic", prefixes=("/v1/messages",), routes=_routes, render=render)
