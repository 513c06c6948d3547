"""Answers of both endpoints: lines of JSON, or one object."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from datetime import datetime, timezone
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp
from typing_extensions import NotRequired, TypedDict

from ...types import Chunk, Completion, Usage
from .. import sse
from ..answering import Ask, bursts, collect
from ..openai.logprobs import ContentLogprob, content_logprobs
from ..routing import Call
from .errors import piece
from .schema import Request

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
        self, call: Call, body: Request, ask: Ask, say: Say, ending: Callable[[list[int]], dict[str, Any]] = lambda ids: {}
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
