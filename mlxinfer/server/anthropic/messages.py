"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp
from typing_extensions import TypedDict

from .. import sse
from ..errors import TooLong
from ..routing import Doc, Endpoint, RequestContext, Server
from ..serving import GenerateRequest, complete, stream
from .answers import Answer, MessageObject
from .protocol import FORMAT, OVERLOADED, Conversation, MessageRequest, check_version, error_event

PING = sse.event("ping", {"type": "ping"})
"""Keeps a silent stream alive."""


class TokenCount(TypedDict):
    input_tokens: int


class CountRequest(Conversation):
    """The body of `POST /v1/messages/count_tokens`: a conversation without settings for an answer."""


async def create(context: RequestContext, body: MessageRequest) -> ASGIApp:
    check_version(context)
    served = await context.model(body.model)
    params, prompt = body.params(served), await body.prompt(served)
    params = body.wanted_thinking().held(params, served, prompt)
    request = GenerateRequest(served, prompt, params, client_id=body.client_id, structure_field=FORMAT)
    answer = Answer(request, reports_cached=body.reports_cached, omits_thinking=body.omits_thinking)
    if body.stream:
        pieces = stream(context, request, answer.render)
        return sse.Stream(pieces, begin=answer.begin(), failed=error_event, limits=context.limits, keep_alive=PING)
    (completion,) = await sse.unless_gone(context.receive, complete(context, request))
    return JSONResponse(answer.whole(completion))


async def count_tokens(context: RequestContext, body: CountRequest) -> ASGIApp:
    check_version(context)
    served = await context.model(body.model)
    context.log["model"] = served.name
    try:
        tokens = len((await body.prompt(served)).token_ids)
    except TooLong as error:  # which is what clients count for
        tokens = error.tokens
    return JSONResponse(TokenCount(input_tokens=tokens))


def routes(server: Server) -> list[Endpoint]:
    """The endpoints of this dialect."""
    doc = Doc("The next message of a conversation", MessageObject, streams=sse.EVENT_STREAM, statuses=(OVERLOADED,))
    counted = Doc("Tokens of a prompt", TokenCount)
    return [
        Endpoint("POST", "/v1/messages", create, MessageRequest, doc, server=server),
        Endpoint("POST", "/v1/messages/count_tokens", count_tokens, CountRequest, counted, server=server),
    ]
