"""A `Problem` as Anthropic tells it."""

from __future__ import annotations

from typing import Literal

from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from .. import sse
from ..problems import Kind, Problem

OVERLOADED = 529
_TYPES: dict[Kind, str] = {
    "authentication": "authentication_error",
    "permission": "permission_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "rate_limit": "rate_limit_error",
    "timeout": "timeout_error",
    "overloaded": "overloaded_error",
    "internal": "api_error",
}
_TOO_LONG = "prompt is too long"
"""How the message has to begin: clients that shorten a conversation and try again know it by these words."""


class Details(TypedDict):
    type: str
    message: str


class Error(TypedDict):
    type: Literal["error"]
    error: Details


def shape(problem: Problem) -> Error:
    """There is no place for the field's name but the message, which has it."""
    message = f"{_TOO_LONG}: {problem.message}" if problem.code == "context_length_exceeded" else problem.message
    return Error(type="error", error=Details(type=_TYPES.get(problem.kind, "invalid_request_error"), message=message))


def render(problem: Problem) -> Response:
    return JSONResponse(shape(problem), OVERLOADED if problem.kind == "overloaded" else problem.status)


def piece(problem: Problem) -> bytes:
    """The end of a stream that failed: clients raise it."""
    return sse.event("error", shape(problem))
