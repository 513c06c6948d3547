"""`POST /v1/completions`: the text goes on, without a chat template."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.responses import JSONResponse
from starlette.types import ASGIApp
from typing_extensions import TypedDict

from ...types import Chunk, Completion, TokenLogprob, Usage
from .. import sse
from ..errors import invalid
from ..models import ServedModel
from ..routing import Doc, Endpoint, RequestContext, Server
from ..serving import GenerateRequest, bursts, collect, encode_text, merged, score, together
from ..validation import PromptOrPrompts, Unsupported
from .protocol import FINGERPRINT, MAX_TOP_LOGPROBS, LegacyLogprobs, Sampling, TextLogprobs, UsageDict, piece, usage_of

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(Sampling):
    """`max_tokens=0` with `echo` and `logprobs` only reads the prompt."""

    prompt: PromptOrPrompts
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Annotated[Any, Unsupported(1)] = None
    suffix: Annotated[Any, Unsupported("")] = None

    def prompts(self, most: int) -> list[str | list[int]]:
        """Raises `APIError`."""
        prompt = self.prompt
        many = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        prompts: list[Any] = list(prompt) if many else [prompt]
        if not all(prompts):
            raise invalid("The prompt is empty.", "prompt", "invalid_value")
        if len(prompts) * (self.n or 1) > most:
            raise invalid(f"prompt: at most {most} prompts, or answers to them, in one request", "prompt", "invalid_value")
        return prompts


class Choice(TypedDict):
    text: str
    index: int
    logprobs: TextLogprobs | None
    finish_reason: str | None


class TextCompletion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: UsageDict


async def create(call: RequestContext, body: CompletionRequest) -> ASGIApp:
    served = call.server.models.get(body.model)
    params = body.params(served, DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens or 1, body.logprobs)
    wants_usage = body.wants_usage()
    prompts = body.prompts(call.server.settings.limits.prompts)
    ids = [await encode_text(served, prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    jobs = [
        _Job(
            call,
            GenerateRequest(served, one, params, client_id=body.user or ""),
            number * params.n,
            body,
            shown=_shown(served, prompt) if body.echo else "",
        )
        for number, (prompt, one) in enumerate(zip(prompts, ids, strict=True))
    ]
    if body.stream:
        return sse.Stream(_streamed(jobs, wants_usage), failed=piece, limits=call.server.settings.limits)
    answers = await sse.unless_gone(call.receive, together(job.answer() for job in jobs))
    usage = usage_of([job.usages for job in jobs])
    return JSONResponse(dict(_head(served), choices=[choice for of_job in answers for choice in of_job], usage=usage))


def _shown(served: ServedModel, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else served.llm.tokenizer.decode(prompt)


def _head(served: ServedModel) -> dict[str, Any]:
    created = int(time.time())
    return {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": created, "model": served.name} | {
        "system_fingerprint": FINGERPRINT
    }


@dataclass(slots=True)
class _Job:
    """One prompt of a request, and the `n` choices from number `first` on that answer it. `shown` is the prompt's text, for echo."""

    call: RequestContext
    ask: GenerateRequest
    first: int
    body: CompletionRequest
    shown: str
    usages: list[Usage] = field(default_factory=list)

    async def answer(self) -> list[Choice]:
        read, completions = await together([self._read(), self._completions()])
        self.usages += [completion.usage for completion in completions]
        choices = []
        for completion in completions:
            logprobs = self._legacy()
            shape = None
            if logprobs is not None:
                shape = logprobs.joined(logprobs.of_prompt(self.ask.prompt, read) if self.body.echo else None, completion.logprobs or ())
            choices.append(self._choice(completion.index, self.shown + completion.text, shape, completion.finish_reason))
        return choices

    async def _read(self) -> Any:
        """Of the prompt's tokens, where they are asked for."""
        if self.body.echo and self.body.logprobs is not None:
            return await score(self.call, self.ask, self.body.logprobs)
        return []

    async def _completions(self) -> Any:
        if self.body.max_tokens == 0:
            return [Completion("", [], "length", Usage(len(self.ask.prompt), 0), None, i) for i in range(self.ask.params.n)]
        return await collect(self.call, self.ask)

    def _legacy(self) -> LegacyLogprobs | None:
        return None if self.body.logprobs is None else LegacyLogprobs(self.ask.served.llm.tokenizer)

    def _choice(self, index: int, text: str, logprobs: TextLogprobs | None, reason: str | None) -> Choice:
        return Choice(text=text, index=self.first + index, logprobs=logprobs, finish_reason=reason)

    async def choices(self) -> AsyncGenerator[list[Choice], None]:
        """In pieces, as many together as came together."""
        legacy = [self._legacy() for _ in range(self.ask.params.n)]
        if self.body.echo:
            read: list[TokenLogprob] = await self._read()
            shapes = [logprobs.of_prompt(self.ask.prompt, read) if logprobs else None for logprobs in legacy]
            yield [self._choice(index, self.shown, shape, None) for index, shape in enumerate(shapes)]
        if self.body.max_tokens == 0:
            self.usages.append(Usage(len(self.ask.prompt), 0))
            yield [self._choice(index, "", None, "length") for index in range(self.ask.params.n)]
            return
        async with aclosing(bursts(self.call, self.ask)) as incoming:
            async for burst in incoming:
                self.usages += [chunk.usage for chunk in burst if chunk.usage]
                yield [self._piece(c, legacy[c.index]) for c in burst if c.text or c.logprobs or c.finish_reason]

    def _piece(self, chunk: Chunk, logprobs: LegacyLogprobs | None) -> Choice:
        shape = logprobs.more(chunk.logprobs) if logprobs and chunk.logprobs else None
        return self._choice(chunk.index, chunk.text, shape, chunk.finish_reason)


async def _streamed(jobs: Sequence[_Job], wants_usage: bool) -> AsyncGenerator[bytes, None]:
    head = _head(jobs[0].ask.served)
    events = sse.Template(head, "choices", {"usage": None} if wants_usage else {})
    async with aclosing(merged([job.choices() for job in jobs])) as incoming:
        async for _, choices in incoming:
            yield b"".join([events.data([choice]) for choice in choices])
    if wants_usage:
        yield sse.data({**head, "choices": [], "usage": usage_of([job.usages for job in jobs])})
    yield sse.DONE


def routes(server: Server) -> list[Endpoint]:
    doc = Doc("How a text goes on", TextCompletion, streams=sse.EVENT_STREAM)
    return [Endpoint("POST", "/v1/completions", create, CompletionRequest, doc, server=server)]
