"""`POST /api/chat`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.types import ASGIApp
from typing_extensions import TypedDict

from .. import sse
from ..answering import Ask, encode_chat
from ..fields import FIRST_ERROR_ONLY, Body, Only
from ..problems import invalid, unsupported
from ..routing import Call, Doc, Endpoint, Server
from .names import find
from .options import Options
from .replies import Lines, Reply, loaded
from .schema import Request

MAX_MESSAGES = 4096


class OllamaMessage(Body):
    """`thinking` of earlier answers goes to the template, which keeps or drops it."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Annotated[Any, Only([])] = None
    tool_calls: Annotated[Any, Only([])] = None
    tool_name: Annotated[Any, Only("")] = None
    tool_call_id: Annotated[Any, Only("")] = None


class OllamaChatRequest(Request):
    messages: Annotated[list[OllamaMessage], FIRST_ERROR_ONLY, Field(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[Any, Only([])] = None


class OllamaAnswer(TypedDict):
    role: Literal["assistant"]
    content: str


class ChatReply(Reply):
    message: OllamaAnswer


def _say(text: str) -> dict[str, Any]:
    return {"message": OllamaAnswer(role="assistant", content=text)}


async def create(call: Call, body: OllamaChatRequest) -> ASGIApp:
    served = find(call.server.models, body.model)
    logprobs = body.wanted_logprobs()
    if not body.messages:
        return loaded(body, _say)
    prompt = await encode_chat(served, for_template(body.messages), **body.variables)
    params = (body.options or Options()).params(served, len(prompt), logprobs)
    return await Lines(call, body, Ask(served, prompt, params), _say).response()


def for_template(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Raises `Problem`."""
    plain = [_plain(message, f"messages[{number}]") for number, message in enumerate(messages)]
    if messages[-1].role == "assistant":
        last = f"messages[{len(messages) - 1}]"
        raise unsupported(last, f"{last}: to continue an answer that is begun is not supported yet: the last message must not be one")
    return plain


def _plain(message: OllamaMessage, where: str) -> dict[str, Any]:
    if message.role == "tool":
        raise unsupported(f"{where}.role", f"{where}.role: tools are not supported yet")
    plain = {"role": message.role, "content": message.content or ""}
    if message.thinking is None or message.thinking == "":
        return plain
    if message.role != "assistant":
        raise invalid(f"{where}.thinking: only an assistant's message has it", f"{where}.thinking", "invalid_value")
    return {**plain, "reasoning_content": message.thinking}


def routes(server: Server) -> list[Endpoint]:
    doc = Doc("The next message of a conversation", ChatReply, streams=sse.JSON_LINES)
    return [Endpoint("POST", "/api/chat", create, OllamaChatRequest, doc, server=server, unsaid=True)]
