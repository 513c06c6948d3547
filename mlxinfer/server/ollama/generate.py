"""`POST /api/generate`: a prompt, through the chat template or raw."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from starlette.types import ASGIApp
from typing_extensions import NotRequired

from .. import sse
from ..answering import Ask, encode_chat, encode_text
from ..fields import Ids, Only
from ..models import Served
from ..problems import invalid
from ..routing import Call, Doc, Endpoint, Server
from .names import find
from .options import Options
from .replies import Lines, Reply, loaded
from .schema import Request


class GenerateRequest(Request):
    """`context` is what an earlier answer gave: the tokens of its prompt and of itself, which go before this prompt."""

    prompt: str | None = None
    system: str | None = None
    context: Annotated[Ids, Field(max_length=2**20)] | None = None
    raw: bool | None = None
    suffix: Annotated[Any, Only("")] = None
    template: Annotated[Any, Only("")] = None
    images: Annotated[Any, Only([])] = None
    width: Annotated[Any, Only(0)] = None
    height: Annotated[Any, Only(0)] = None
    steps: Annotated[Any, Only(0)] = None


class GenerateReply(Reply):
    response: str
    context: NotRequired[list[int]]


def _say(text: str) -> dict[str, Any]:
    return {"response": text}


async def create(call: Call, body: GenerateRequest) -> ASGIApp:
    served = find(call.server.models, body.model)
    logprobs = body.wanted_logprobs()
    if not body.prompt:
        return loaded(body, _say)
    prompt = await _prompt(served, body, body.prompt)
    params = (body.options or Options()).params(served, len(prompt), logprobs)

    def context(answer: list[int]) -> dict[str, Any]:
        return {} if body.raw else {"context": prompt + answer}

    return await Lines(call, body, Ask(served, prompt, params), _say, context).response()


async def _prompt(served: Served, body: GenerateRequest, text: str) -> list[int]:
    """Raises `Problem`."""
    if body.raw:
        for name in ("system", "context"):
            if getattr(body, name):
                raise invalid(f"{name} is only for prompts that are not raw", name, "invalid_value")
        return await encode_text(served, text)
    system = [{"role": "system", "content": body.system}] if body.system else []
    ids = await encode_chat(served, [*system, {"role": "user", "content": text}], **body.variables)
    if not body.context:
        return ids
    begins_anew = ids[:1] == [served.llm.tokenizer.bos_token_id]
    return [*body.context, *(ids[1:] if begins_anew else ids)]


def routes(server: Server) -> list[Endpoint]:
    doc = Doc("An answer to a prompt", GenerateReply, streams=sse.JSON_LINES)
    return [Endpoint("POST", "/api/generate", create, GenerateRequest, doc, server=server, unsaid=True)]
