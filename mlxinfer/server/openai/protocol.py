"""Shared parts of this dialect: errors, sampling fields, usage and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Annotated, Any

from pydantic import Field
from starlette.responses import JSONResponse, Response
from typing_extensions import NotRequired, TypedDict

from ..._version import __version__
from ...errors import SamplingError
from ...structure import Choice, Lark, Regex, Schema, Structure
from ...tokenizer import Tokenizer
from ...types import SamplingParams, TokenLogprob, Usage
from .. import sse
from ..errors import APIError, Kind, invalid
from ..model_manager.registry import ServedModel
from ..shared.structure import Choices, ResponseFormat, SchemaField, StructuredOutputs, only_one, structure_from, structure_refused
from ..validation import Ids, StrictModel, TextOrTexts, Unsupported
from .extras import Extras

FINGERPRINT = f"mlxinfer-{__version__}"
MAX_N = 128
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
Penalty = Annotated[float, Field(ge=-2, le=2)]
_SAMPLED = (
    *("n", "seed", "temperature", "top_p", "presence_penalty", "frequency_penalty"),
    *("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "stop_on_loop"),
)
"""Fields that are sampling parameters with the same name."""
_TYPES: dict[Kind, str] = {
    "authentication": "authentication_error",
    "permission": "permission_error",
    "rate_limit": "rate_limit_error",
    "overloaded": "server_error",
    "internal": "server_error",
    "timeout": "timeout_error",
}


class OpenAIErrorDetails(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorBody(TypedDict):
    error: OpenAIErrorDetails


def error_object(error: APIError) -> OpenAIErrorBody:
    kind = _TYPES.get(error.kind, "invalid_request_error")
    return OpenAIErrorBody(error=OpenAIErrorDetails(message=error.message, type=kind, param=error.param, code=error.code))


def error_response(error: APIError) -> Response:
    """The error response."""
    return JSONResponse(error_object(error), error.status)


def error_event(error: APIError) -> bytes:
    """The last event of a failed stream; clients raise it. No [DONE] follows."""
    return sse.data(error_object(error))


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, Unsupported(False)] = None


class SamplingFields(Extras):
    """Sampling fields. Fields from `top_k` on are not OpenAI's; other engines accept them too."""

    model: Annotated[str, Field(max_length=256)]
    stop: TextOrTexts | None = None
    seed: int | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    user: Annotated[str, Field(max_length=256)] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    stop_on_loop: bool | None = None

    @cached_property
    def structure(self) -> tuple[str, Structure | None]:
        """The field with the constraint on the answer, and the constraint. Raises `APIError`."""
        raise NotImplementedError

    def params(self, served: ServedModel, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """The model's default parameters with the request's values. Raises `APIError`."""
        field, structure = self.structure
        given = {name: value for name in _SAMPLED if (value := getattr(self, name, None)) is not None}
        if self.logit_bias:
            given["logit_bias"] = {_token_id(key): value for key, value in self.logit_bias.items()}
        stops = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        if len(stops) > MAX_STOPS:
            raise invalid(f"stop: at most {MAX_STOPS} texts", "stop", "invalid_value")
        given["stop"] = stops or None
        try:
            return replace(served.llm.default_params, max_tokens=max_tokens, logprobs=logprobs, structure=structure, **given)
        except SamplingError as error:
            raise structure_refused(error, field) from None


_STRUCTURES: dict[str, Callable[[str, Any], Structure | None]] = {
    "guided_json": partial(structure_from, kind=Schema),
    "guided_regex": partial(structure_from, kind=Regex),
    "guided_choice": partial(structure_from, kind=Choice),
    "guided_grammar": partial(structure_from, kind=Lark),
    "response_format": lambda name, value: value.structure(name),
    "structured_outputs": lambda name, value: value.structure(name),
}
"""Constructors of constraints by the name of the field."""


class CompletionFields(SamplingFields):
    """Fields of both completion endpoints. Fields from `structured_outputs` on are vLLM's; those from `guided_json` on are its older
    names."""

    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaField | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: Annotated[str, Field(max_length=256)] | None = None

    @cached_property
    def structure(self) -> tuple[str, Structure | None]:
        """See `SamplingFields`."""
        given = {name: make(name, value) for name, make in _STRUCTURES.items() if (value := getattr(self, name)) is not None}
        found = only_one(given)
        return next((name for name in given if given[name] is found), ""), found

    def wants_usage(self) -> bool:
        """True if a stream ends with its usage. Raises `APIError`."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options is only for stream=true", "stream_options", "invalid_value")
        return bool(self.stream_options and self.stream_options.include_usage)


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise invalid("logit_bias: its keys must be token ids", "logit_bias", "invalid_value")
    return int(key)


class PromptDetails(TypedDict):
    """`image_tokens` are part of `prompt_tokens`. Prompts without images do not have the field."""

    cached_tokens: int
    image_tokens: NotRequired[int]


class CompletionDetails(TypedDict):
    """`reasoning_tokens` are part of `completion_tokens`."""

    reasoning_tokens: int


class UsageDict(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


def usage_of(usages: Sequence[Sequence[Usage]]) -> UsageDict:
    """The sum over all prompts. `usages` has the usages of each prompt's answers; the prompt itself counts once."""
    firsts = [of_prompt[0] for of_prompt in usages if of_prompt]
    prompt = sum(usage.prompt_tokens for usage in firsts)
    completion = sum(usage.completion_tokens for of_prompt in usages for usage in of_prompt)
    cached = sum(usage.stats.reused_tokens for usage in firsts)
    thought = sum(usage.reasoning_tokens for of_prompt in usages for usage in of_prompt)
    return UsageDict(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=prompt_details(cached, sum(usage.stats.image_tokens for usage in firsts)),
        completion_tokens_details=CompletionDetails(reasoning_tokens=thought),
    )


def prompt_details(cached: int, image: int) -> PromptDetails:
    """Parts of a prompt's tokens."""
    return PromptDetails(cached_tokens=cached, image_tokens=image) if image else PromptDetails(cached_tokens=cached)


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(TypedDict):
    content: list[ContentLogprob]
    refusal: None


def token_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> ChoiceLogprobs:
    """Log-probabilities in the shape of chat completions."""
    return ChoiceLogprobs(content=content_logprobs(tokenizer, logprobs), refusal=None)


def content_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> list[ContentLogprob]:
    """One entry per token. The Responses API and Ollama's API use the same shape."""

    def bytes_of(token_id: int) -> list[int]:
        return list(tokenizer.token_bytes(token_id) or b"")

    return [
        ContentLogprob(
            token=one.text,
            logprob=finite(one.logprob),
            bytes=bytes_of(one.token_id),
            top_logprobs=[TopLogprob(token=text, logprob=finite(value), bytes=bytes_of(i)) for i, text, value in one.top],
        )
        for one in logprobs
    ]


def finite(logprob: float) -> float:
    """The log-probability, but at least -9999: JSON has no infinity, and OpenAI uses this value for impossible tokens."""
    return max(logprob, -9999.0)


class TextLogprobs(TypedDict):
    """`text_offset` is the number of characters of the choice's text before each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class LegacyLogprobs:
    """Log-probabilities in the shape of completions, for the consecutive tokens of one choice."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._characters = 0

    def of_prompt(self, prompt: Sequence[int], logprobs: Sequence[TokenLogprob]) -> TextLogprobs:
        """Log-probabilities of a prompt. The first token has none, because nothing precedes it."""
        first = prompt[0]
        text = self._tokenizer.token_text(first)
        begin = TextLogprobs(tokens=[text], token_logprobs=[None], top_logprobs=[None], text_offset=[self._place(first)])
        return self.joined(begin, logprobs)

    def joined(self, before: TextLogprobs | None, logprobs: Sequence[TokenLogprob]) -> TextLogprobs:
        after = self.more(logprobs)
        if before is None:
            return after
        return TextLogprobs(
            tokens=before["tokens"] + after["tokens"],
            token_logprobs=before["token_logprobs"] + after["token_logprobs"],
            top_logprobs=before["top_logprobs"] + after["top_logprobs"],
            text_offset=before["text_offset"] + after["text_offset"],
        )

    def more(self, logprobs: Sequence[TokenLogprob]) -> TextLogprobs:
        """Log-probabilities of the next tokens. `top_logprobs` always includes the token itself."""
        return TextLogprobs(
            tokens=[one.text for one in logprobs],
            token_logprobs=[finite(one.logprob) for one in logprobs],
            top_logprobs=[_by_text(one) for one in logprobs],
            text_offset=[self._place(one.token_id) for one in logprobs],
        )

    def _place(self, token_id: int) -> int:
        place = self._characters
        self._characters += len(self._detokenizer.add(token_id))
        return place


def _by_text(one: TokenLogprob) -> dict[str, float]:
    """Log-probability by text; tokens with the same text get the highest one."""
    found = {text: finite(value) for _, text, value in reversed(one.top)}
    found.setdefault(one.text, finite(one.logprob))
    return found
