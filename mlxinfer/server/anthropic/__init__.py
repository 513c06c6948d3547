"""Anthropic's API: messages, and how many tokens they are."""

from __future__ import annotations

from ..routing import Dialect
from . import messages
from .protocol import render

DIALECT = Dialect(name="anthropic", prefixes=("/v1/messages",), routes=messages.routes, render=render)
