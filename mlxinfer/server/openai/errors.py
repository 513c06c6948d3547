"""A `Problem` as OpenAI tells it."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from .. import sse
from ..problems import Kind, Problem

_TYPES: dict[Kind, str] = {
    "authentication": "authentication_error",
    "permission": "permission_error",
    "rate_limit": "rate_limit_error",
    "overloaded": "server_error",
    "internal": "server_error",
    "timeout": "timeout_error",
}


class Details(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    error: Details


def shape(problem: Problem) -> Error:
    kind = _TYPES.get(problem.kind, "invalid_request_error")
    return Error(error=Details(message=problem.message, type=kind, param=problem.param, code=problem.code))


def render(problem: Problem) -> Response:
    return JSONResponse(shape(problem), problem.status)


def piece(problem: Problem) -> bytes:
    """The end of a stream that failed: clients raise it. There is no [DONE] after it."""
    return sse.data(shape(problem))
