"""A `Problem` as Ollama tells it."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from .. import sse
from ..problems import Problem


class Error(TypedDict):
    """The message has the field's name where one is at fault."""

    error: str


def shape(problem: Problem) -> Error:
    return Error(error=problem.message)


def render(problem: Problem) -> Response:
    return JSONResponse(shape(problem), problem.status)


def piece(problem: Problem) -> bytes:
    """The end of a stream that failed: clients raise it."""
    return sse.line(shape(problem))
