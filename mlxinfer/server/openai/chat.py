"""`POST /v1/chat/completions`, and vLLM's `POST /tokenize` for the tokens of its prompts and of texts."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, TypeVar

from pydantic import Field
from starlette.responses import JSONResponse
from starlette.types import ASGIApp
from typing_extensions import TypedDict

from ...types import Chunk, Completion, SamplingParams
from .. import sse
from ..errors import invalid, unsupported
from ..routing import Doc, Endpoint, RequestContext, Server
from ..serving import GenerateRequest, complete, encode_chat, encode_continued, encode_text, stream
from ..settings import ReasoningField, ServerSettings
from ..shared.reasoning import Effort, Thinking
from ..validation import MaxTokensOrZero, StrictModel, Unsupported
from .chat_answers import AnswerForm, ChatCompletion, ChatEvents
from .extras import VERBOSITY, Extras
from .messages import Messages, for_template
from .protocol import MAX_TOP_LOGPROBS, CompletionFields, error_event
from .tools import ToolFields

MAX_BUDGET = 2**31 - 1
ENDLESS = -1
"""llama.cpp's reasoning budget for no limit."""


class TemplateVariables(StrictModel):
    """Variables of the chat template that a request may set. Variables that the template does not read have no effect."""

    enable_thinking: bool | None = None
    """True to reason before the answer."""
    thinking: bool | None = None
    """Another name for `enable_thinking`."""
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None
    """Reasoning effort in the template's own words."""
    preserve_thinking: bool | None = None
    """True to keep the reasoning of earlier answers in the prompt."""
    clear_thinking: bool | None = None
    """True to leave out the reasoning of earlier answers."""


class RouterReasoning(StrictModel):
    """OpenRouter's reasoning settings."""

    effort: Effort | None = None
    max_tokens: Annotated[int, Field(ge=0, le=MAX_BUDGET)] | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    """True to leave the reasoning out of answers."""


class ChatRequest(ToolFields, CompletionFields):
    """The body of `POST /v1/chat/completions`. `thinking_token_budget` and `chat_template_kwargs` are vLLM's fields,
    `thinking_budget_tokens` and `reasoning_budget_tokens` llama.cpp's, `reasoning` and `include_reasoning` OpenRouter's."""

    messages: Messages
    max_tokens: MaxTokensOrZero | None = None
    """0 reads the prompt into the prefix cache and answers with an empty text."""
    max_completion_tokens: MaxTokensOrZero | None = None
    continue_final_message: bool | None = None
    """True if the last message is an answer to continue. The response has only the continuation."""
    add_generation_prompt: bool | None = None
    """False is accepted only together with `continue_final_message`."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, le=MAX_BUDGET)] | None = None
    thinking_budget_tokens: Annotated[int, Field(ge=-1, le=MAX_BUDGET)] | None = None
    reasoning_budget_tokens: Annotated[int, Field(ge=-1, le=MAX_BUDGET)] | None = None
    reasoning: RouterReasoning | None = None
    include_reasoning: bool | None = None
    modalities: Annotated[Any, Unsupported(["text"])] = None
    audio: Annotated[Any, Unsupported()] = None
    prediction: Annotated[Any, Unsupported()] = None
    verbosity: Annotated[Any, VERBOSITY] = None
    web_search_options: Annotated[Any, Unsupported()] = None
    moderation: Annotated[Any, Unsupported()] = None

    def thinking(self) -> Thinking:
        """The reasoning settings of the request."""
        variables, router = self.chat_template_kwargs, self.reasoning or RouterReasoning()
        switches = (variables.thinking, variables.enable_thinking) if variables else ()
        budgets = (self.thinking_token_budget, self.thinking_budget_tokens, self.reasoning_budget_tokens, router.max_tokens)
        budget = next((budget for budget in budgets if budget is not None), ENDLESS)
        on = next((switch for switch in (*switches, router.enabled) if switch is not None), None)
        return Thinking(on, self.reasoning_effort or router.effort, None if budget == ENDLESS else budget)

    def reasoning_field(self, settings: ServerSettings) -> ReasoningField:
        """The fields of answers with the reasoning of the model."""
        excluded = self.include_reasoning is False or (self.reasoning is not None and self.reasoning.exclude)
        return "none" if excluded else settings.reasoning_field

    @property
    def given_variables(self) -> dict[str, Any]:
        """Variables of the chat template that the request sets."""
        return {} if self.chat_template_kwargs is None else self.chat_template_kwargs.model_dump(exclude_none=True)

    @property
    def goes_on(self) -> bool:
        """True if the last message is an answer to continue. Raises `APIError` if that contradicts other fields."""
        if not self.continue_final_message:
            if self.add_generation_prompt is False:
                raise unsupported("add_generation_prompt", "add_generation_prompt: false is for continue_final_message only")
            return False
        if self.structure[1] is not None or self.offer().choice.mode == "required":
            raise invalid("continue_final_message: not with a structure or a required call", "continue_final_message", "invalid_value")
        return True

    def limit(self) -> int | None:
        """Maximum tokens of an answer; None means up to the end of the context, 0 none at all. Raises `APIError`."""
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise invalid("max_tokens and max_completion_tokens mean the same: give one", "max_tokens", "invalid_value")
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    def wanted_logprobs(self) -> int | None:
        """Alternatives per token in the log-probabilities; None means no log-probabilities. Raises `APIError`."""
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs is only for logprobs=true", "top_logprobs", "invalid_value")
        return (self.top_logprobs or 0) if self.logprobs else None


async def create(context: RequestContext, body: ChatRequest) -> ASGIApp:
    served = await context.model(body.model, body.keep_alive_s)
    limit, wants_usage = body.limit(), body.wants_usage()
    reads_only = limit == 0
    params, thinking, goes_on = body.params(served, 1 if reads_only else limit, body.wanted_logprobs()), body.thinking(), body.goes_on
    encode = encode_continued if goes_on else encode_chat
    variables = thinking.variables(served, body.given_variables)
    prompt = await encode(context, served, for_template(body.messages), body.offer(), variables)
    params = _one_token(params) if reads_only else thinking.held(params, served, prompt)
    request = GenerateRequest(
        served, prompt, params, client_id=body.user or "", cache_salt=body.cache_salt or "", structure_field=body.structure[0]
    )
    form, streams = AnswerForm(served, body.reasoning_field(context.server.settings), body.has_older_form), body.stream
    del body  # images have megabytes
    if streams:
        events = ChatEvents(form, wants_usage)
        render = events.render if not reads_only else lambda chunks: events.render([_without_text(chunk) for chunk in chunks])
        return sse.Stream(stream(context, request, render), end=events.end, failed=error_event, limits=context.limits)
    answers = await sse.unless_gone(context.receive, complete(context, request))
    return JSONResponse(form.whole([_without_text(answer) for answer in answers] if reads_only else answers))


def _one_token(params: SamplingParams) -> SamplingParams:
    """Parameters of a request that only reads its prompt: the engine reads a prompt in order to choose a token, which is dropped."""
    return replace(params, temperature=0.0, structure=None, logprobs=None, stop=None, ignore_eos=True)


_Part = TypeVar("_Part", Chunk, Completion)


def _without_text(part: _Part) -> _Part:
    """A piece of an answer, or all of it, without its token."""
    usage = part.usage and replace(part.usage, completion_tokens=0, reasoning_tokens=0)
    return replace(part, text="", token_ids=[], reasoning="", tool_calls=(), usage=usage)


class TokenizeRequest(ToolFields, Extras):
    """The body of `POST /tokenize`: a `prompt`, or `messages` with the fields of a chat completion that change its prompt."""

    model: Annotated[str, Field(max_length=256)]
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: Annotated[Any, Unsupported(True)] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    return_token_strs: bool | None = None

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template that the request sets."""
        return {} if self.chat_template_kwargs is None else self.chat_template_kwargs.model_dump(exclude_none=True)


class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


async def tokenize(context: RequestContext, body: TokenizeRequest) -> ASGIApp:
    """Answer with the tokens. Raises `APIError`."""
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give one of prompt and messages", "prompt", "invalid_value")
    if body.add_generation_prompt is False and not body.continue_final_message:
        raise unsupported("add_generation_prompt", "add_generation_prompt: false is for continue_final_message only")
    served = await context.model(body.model)
    context.log["model"] = served.name
    if body.messages is None:
        tokens = await encode_text(served, body.prompt or "")
    else:
        encode = encode_continued if body.continue_final_message else encode_chat
        tokens = (await encode(context, served, for_template(body.messages), body.offer(), body.variables)).token_ids
    texts = [served.llm.tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
    return JSONResponse(Tokens(count=len(tokens), max_model_len=served.llm.max_context, tokens=tokens, token_strs=texts))


def routes(server: Server) -> list[Endpoint]:
    doc = Doc("The next message of a conversation", ChatCompletion, streams=sse.EVENT_STREAM)
    tokens = Doc("The tokens of a text or a conversation", Tokens)
    return [
        Endpoint("POST", "/v1/chat/completions", create, ChatRequest, doc, server=server, images=True),
        Endpoint("POST", "/tokenize", tokenize, TokenizeRequest, tokens, server=server, images=True),
    ]
