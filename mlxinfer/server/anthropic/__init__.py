"""Anthropic's API: messages and their token counts (https://docs.anthropic.com/en/api/messages)."""

from __future__ import annotations

from ..routing import Dialect
from . import messages
from .protocol import error_response

DIALECT = Dialect(name="anthropic", prefixes=("/v1/messages",), routes=messages.routes, error_response=error_response)
