"""`POST /v1/completions`: continues texts, without a chat template."""

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
from ..model_manager.registry import ServedModel
from ..routing import Doc, Endpoint, RequestContext, Server
from ..serving import GenerateRequest, complete, encode_text, merged, score, stream, together
from ..validation import PromptOrPrompts, Unsupported
from .protocol import FINGERPRINT, MAX_TOP_LOGPROBS, CompletionFields, LegacyLogprobs, TextLogprobs, UsageDict, error_event, usage_of
from .tools import finish_reason

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(CompletionFields):
    """The body of `POST /v1/completions`. `max_tokens=0` with `echo` and `logprobs` scores the prompt without generating; -1 means no
    limit."""

    prompt: PromptOrPrompts
    max_tokens: Annotated[int, Field(ge=-1)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Annotated[Any, Unsupported(1)] = None
    suffix: Annotated[Any, Unsupported("")] = None

    @property
    def limit(self) -> int | None:
        """Maximum tokens of an answer; None means up to the end of the context."""
        if self.max_tokens is None:
            return DEFAULT_MAX_TOKENS
        return None if self.max_tokens == -1 else self.max_tokens or 1

    def prompts(self, most: int) -> list[str | list[int]]:
        """The prompts as texts or token ids. Raises `APIError`, for example for more than `most` answers to all prompts together."""
        prompt = self.prompt
        many = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        prompts: list[Any] = list(prompt) if many else [prompt]
        if not all(prompts):
            raise invalid("The prompt is empty.", "prompt", "invalid_value")
        if len(prompts) * (self.n or 1) > most:
            raise invalid(f"prompt: at most {most} prompts, or answers to them, in one request", "prompt", "invalid_value")
        return prompts


class CompletionChoice(TypedDict):
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
    choices: list[CompletionChoice]
    usage: UsageDict


async def create(context: RequestContext, body: CompletionRequest) -> ASGIApp:
    served = await context.model(body.model, body.keep_alive_s)
    params = body.params(served, body.limit, body.logprobs)
    wants_usage = body.wants_usage()
    jobs: list[_Job] = []
    for number, prompt in enumerate(body.prompts(context.limits.prompts)):
        ids = await encode_text(served, prompt) if isinstance(prompt, str) else prompt
        request = GenerateRequest(
            served, ids, params, client_id=body.user or "", cache_salt=body.cache_salt or "", structure_field=body.structure[0]
        )
        jobs.append(_Job(context, request, number * params.n, body, _echoed(served, prompt) if body.echo else ""))
    if body.stream:
        return _streamed(context, jobs, wants_usage)
    choices = await sse.unless_gone(context.receive, together(job.choices() for job in jobs))
    usage = usage_of([job.usages for job in jobs])
    return JSONResponse(dict(_completion_head(served), choices=[choice for of_job in choices for choice in of_job], usage=usage))


def _streamed(context: RequestContext, jobs: Sequence[_Job], wants_usage: bool) -> sse.Stream:
    head = _completion_head(jobs[0].request.served)
    template = sse.Template(head, "choices", {"usage": None} if wants_usage else {})

    def end() -> bytes:
        usage = {**head, "choices": [], "usage": usage_of([job.usages for job in jobs])}
        return (sse.data(usage) if wants_usage else b"") + sse.DONE

    return sse.Stream(merged([job.events(template) for job in jobs]), end=end, failed=error_event, limits=context.limits)


def routes(server: Server) -> list[Endpoint]:
    doc = Doc("The continuation of a text", TextCompletion, streams=sse.EVENT_STREAM)
    return [Endpoint("POST", "/v1/completions", create, CompletionRequest, doc, server=server)]


def _echoed(served: ServedModel, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else served.llm.tokenizer.decode(prompt)


def _completion_head(served: ServedModel) -> dict[str, Any]:
    created = int(time.time())
    return {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": created, "model": served.name} | {
        "system_fingerprint": FINGERPRINT
    }


@dataclass(slots=True)
class _Job:
    """One prompt of a request, and its `n` choices."""

    context: RequestContext
    request: GenerateRequest
    first: int
    """Index of the first choice within the whole request."""
    body: CompletionRequest
    echoed: str
    """The prompt's text if `echo` is set; otherwise empty."""
    usages: list[Usage] = field(default_factory=list)
    """Usage of each finished choice."""

    async def choices(self) -> list[CompletionChoice]:
        """All choices, complete."""
        prompt_logprobs, completions = await together([self._score(), self._complete()])
        self.usages += [completion.usage for completion in completions]
        return [self._whole(completion, prompt_logprobs) for completion in completions]

    def events(self, template: sse.Template) -> AsyncGenerator[bytes, None]:
        """The choices as events."""
        logprobs = [self._logprobs() for _ in range(self.request.params.n)]

        def render(chunks: list[Chunk]) -> bytes:
            self.usages += [chunk.usage for chunk in chunks if chunk.usage]
            choices = [self._piece(c, logprobs[c.index]) for c in chunks if c.text or c.logprobs or c.finish_reason]
            return b"".join([template.data([choice]) for choice in choices])

        generated = stream(self.context, self.request, render)
        return self._after_prompt(generated, template, logprobs) if self.body.echo or self.body.max_tokens == 0 else generated

    async def _after_prompt(
        self, generated: AsyncGenerator[bytes, None], template: sse.Template, logprobs: Sequence[LegacyLogprobs | None]
    ) -> AsyncGenerator[bytes, None]:
        """The echoed prompt if `echo` is set, then the generated text."""
        if self.body.echo:
            scored: list[TokenLogprob] = await self._score()
            for index, one in enumerate(logprobs):
                yield template.data(
                    [self._choice(index, self.echoed, one.of_prompt(self.request.token_ids, scored) if one else None, None)]
                )
        if self.body.max_tokens == 0:
            self.usages.append(Usage(len(self.request.token_ids), 0))
            for index in range(len(logprobs)):
                yield template.data([self._choice(index, "", None, "length")])
            return
        async with aclosing(generated) as pieces:
            async for piece in pieces:
                yield piece

    async def _score(self) -> Any:
        """Log-probabilities of the prompt's tokens if requested; otherwise empty."""
        if self.body.echo and self.body.logprobs is not None:
            return await score(self.context, self.request, self.body.logprobs)
        return []

    async def _complete(self) -> Any:
        if self.body.max_tokens == 0:
            return [Completion("", [], "length", Usage(len(self.request.token_ids), 0), None, i) for i in range(self.request.params.n)]
        return await complete(self.context, self.request)

    def _whole(self, completion: Completion, scored: Sequence[TokenLogprob]) -> CompletionChoice:
        logprobs, found = self._logprobs(), None
        if logprobs is not None:
            before = logprobs.of_prompt(self.request.token_ids, scored) if self.body.echo else None
            found = logprobs.joined(before, completion.logprobs or ())
        return self._choice(completion.index, self.echoed + completion.text, found, finish_reason(completion.finish_reason))

    def _piece(self, chunk: Chunk, logprobs: LegacyLogprobs | None) -> CompletionChoice:
        found = logprobs.more(chunk.logprobs) if logprobs and chunk.logprobs else None
        return self._choice(chunk.index, chunk.text, found, chunk.finish_reason and finish_reason(chunk.finish_reason))

    def _logprobs(self) -> LegacyLogprobs | None:
        return None if self.body.logprobs is None else LegacyLogprobs(self.request.served.llm.tokenizer)

    def _choice(self, index: int, text: str, logprobs: TextLogprobs | None, reason: str | None) -> CompletionChoice:
        return CompletionChoice(text=text, index=self.first + index, logprobs=logprobs, finish_reason=reason)
