"""`POST /v1/messages/count_tokens`: what `usage` of the same message would say, without an answer."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp
from typing_extensions import TypedDict

from ..routing import Call, Doc, Endpoint, Server
from .schema import Conversation, check_version


class TokenCount(TypedDict):
    input_tokens: int


class CountRequest(Conversation):
    """A conversation, and nothing on how to go on with it."""


async def count(call: Call, body: CountRequest) -> ASGIApp:
    check_version(call)
    served = call.server.models.get(body.model)
    call.log["model"] = served.name
    return JSONResponse(TokenCount(input_tokens=len(await body.prompt(served))))


def routes(server: Server) -> list[Endpoint]:
    return [Endpoint("POST", "/v1/messages/count_tokens", count, CountRequest, Doc("Tokens of a prompt", TokenCount), server=server)]
