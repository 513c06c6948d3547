"""`POST /api/generate`: a prompt, through the chat template or raw."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from datetime import datetime, timezone
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp
from typing_extensions import NotRequired, TypedDict

from ...types import Chunk, Completion, Usage
from .. import sse
from ..errors import invalid, unsupported
from ..models import ServedModel
from ..openai.protocol import ContentLogprob, content_logprobs
from ..routing import Doc, Endpoint, RequestContext, Server
from ..serving import GenerateRequest, bursts, collect, encode_chat, encode_text
from ..validation import FIRST_ERROR_ONLY, Ids, StrictModel, Unsupported
from .models import find
from .protocol import Options, Request, piece

Say = Callable[[str], dict[str, Any]]
"""The part of an answer that has the text."""


class Head(TypedDict):
    model: str
    created_at: str


class Reply(Head):
    """Durations are in nanoseconds."""

    done: bool
    done_reason: NotRequired[str]
    logprobs: NotRequired[list[ContentLogprob]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]


def now() -> str:
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")


def head(body: Request) -> Head:
    """The model is called what the client calls it."""
    return Head(model=body.model, created_at=now())


def loaded(body: Request, say: Say) -> ASGIApp:
    """To a request without a prompt, which only asks for the model to be there."""
    reply = {**head(body), **say(""), "done": True, "done_reason": "load"}
    return Response(sse.line(reply), media_type=sse.JSON_LINES) if body.streams else JSONResponse(reply)


class Lines:
    """An answer in the making. `ending(token ids)` gives what else its end tells."""

    def __init__(
        self,
        call: RequestContext,
        body: Request,
        ask: GenerateRequest,
        say: Say,
        ending: Callable[[list[int]], dict[str, Any]] = lambda ids: {},
    ) -> None:
        self._call = call
        self._body = body
        self._ask = ask
        self._say = say
        self._ending = ending
        self._began = time.monotonic_ns()

    async def response(self) -> ASGIApp:
        if self._body.streams:
            return self._streamed()
        (answer,) = await sse.unless_gone(self._call.receive, collect(self._call, self._ask))
        return JSONResponse(self._whole(answer))

    def _streamed(self) -> sse.Stream:
        """Clients read every line as JSON, so that what keeps the connection alive is an answer without text."""
        alive = sse.line({**head(self._body), **self._say(""), "done": False})
        limits = self._call.server.settings.limits
        return sse.Stream(self._lines(), failed=piece, limits=limits, media_type=sse.JSON_LINES, keep_alive=alive)

    async def _lines(self) -> AsyncGenerator[bytes, None]:
        token_ids: list[int] = []
        async with aclosing(bursts(self._call, self._ask)) as incoming:
            async for burst in incoming:
                out = b""
                for chunk in burst:
                    token_ids += chunk.token_ids
                    if chunk.text or chunk.logprobs:
                        out += sse.line({**head(self._body), **self._say(chunk.text), **self._logprobs(chunk), "done": False})
                    if chunk.finish_reason:
                        out += sse.line({**head(self._body), **self._say(""), **self._end(chunk), **self._ending(token_ids)})
                yield out

    def _whole(self, answer: Completion) -> dict[str, Any]:
        said = {**head(self._body), **self._say(answer.text), **self._logprobs(answer)}
        return {**said, **self._end(answer), **self._ending(answer.token_ids)}

    def _logprobs(self, part: Chunk | Completion) -> dict[str, Any]:
        if not part.logprobs:
            return {}
        return {"logprobs": content_logprobs(self._ask.served.llm.tokenizer, part.logprobs)}

    def _end(self, last: Chunk | Completion) -> dict[str, Any]:
        usage = last.usage or Usage(len(self._ask.prompt), 0)
        return {
            "done": True,
            "done_reason": last.finish_reason,
            "total_duration": time.monotonic_ns() - self._began,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": round(usage.stats.prefill_s * 1e9),
            "eval_count": usage.completion_tokens,
            "eval_duration": round(usage.stats.decode_s * 1e9),
        }


class OllamaGenerateRequest(Request):
    """`context` is what an earlier answer gave: the tokens of its prompt and of itself, which go before this prompt."""

    prompt: str | None = None
    system: str | None = None
    context: Annotated[Ids, Field(max_length=2**20)] | None = None
    raw: bool | None = None
    suffix: Annotated[Any, Unsupported("")] = None
    template: Annotated[Any, Unsupported("")] = None
    images: Annotated[Any, Unsupported([])] = None
    width: Annotated[Any, Unsupported(0)] = None
    height: Annotated[Any, Unsupported(0)] = None
    steps: Annotated[Any, Unsupported(0)] = None


class GenerateReply(Reply):
    response: str
    context: NotRequired[list[int]]


def _as_response(text: str) -> dict[str, Any]:
    return {"response": text}


async def generate(call: RequestContext, body: OllamaGenerateRequest) -> ASGIApp:
    served = find(call.server.models, body.model)
    logprobs = body.wanted_logprobs()
    if not body.prompt:
        return loaded(body, _as_response)
    prompt = await _prompt(served, body, body.prompt)
    params = (body.options or Options()).params(served, len(prompt), logprobs)

    def context(answer: list[int]) -> dict[str, Any]:
        return {} if body.raw else {"context": prompt + answer}

    return await Lines(call, body, GenerateRequest(served, prompt, params), _as_response, context).response()


async def _prompt(served: ServedModel, body: OllamaGenerateRequest, text: str) -> list[int]:
    """Raises `APIError`."""
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
    answer = Doc("An answer to a prompt", GenerateReply, streams=sse.JSON_LINES)
    message = Doc("The next message of a conversation", ChatReply, streams=sse.JSON_LINES)
    return [
        Endpoint("POST", "/api/generate", generate, OllamaGenerateRequest, answer, server=server, unsaid=True),
        Endpoint("POST", "/api/chat", chat, OllamaChatRequest, message, server=server, unsaid=True),
    ]


MAX_MESSAGES = 4096


class OllamaMessage(StrictModel):
    """`thinking` of earlier answers goes to the template, which keeps or drops it."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Annotated[Any, Unsupported([])] = None
    tool_calls: Annotated[Any, Unsupported([])] = None
    tool_name: Annotated[Any, Unsupported("")] = None
    tool_call_id: Annotated[Any, Unsupported("")] = None


class OllamaChatRequest(Request):
    messages: Annotated[list[OllamaMessage], FIRST_ERROR_ONLY, Field(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[Any, Unsupported([])] = None


class OllamaAnswer(TypedDict):
    role: Literal["assistant"]
    content: str


class ChatReply(Reply):
    message: OllamaAnswer


def _as_message(text: str) -> dict[str, Any]:
    return {"message": OllamaAnswer(role="assistant", content=text)}


async def chat(call: RequestContext, body: OllamaChatRequest) -> ASGIApp:
    served = find(call.server.models, body.model)
    logprobs = body.wanted_logprobs()
    if not body.messages:
        return loaded(body, _as_message)
    prompt = await encode_chat(served, for_template(body.messages), **body.variables)
    params = (body.options or Options()).params(served, len(prompt), logprobs)
    return await Lines(call, body, GenerateRequest(served, prompt, params), _as_message).response()


def for_template(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Raises `APIError`."""
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
