"""Fields that requests of this API share, and what they mean to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from ..._version import __version__
from ...errors import SamplingError
from ...types import SamplingParams, Usage
from ..fields import Body, Ids, Only, TextOrTexts
from ..models import Served
from ..problems import invalid, of_error

FINGERPRINT = f"mlxinfer-{__version__}"
MAX_N = 128
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16

Penalty = Annotated[float, Field(ge=-2, le=2)]


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, Only(False)] = None


class Sampled(Body):
    """How to choose tokens. The last fields are not OpenAI's: they are what other engines accept beside them."""

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

    def params(self, served: Served, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """The model's own defaults, with what the request says. Raises `Problem`."""
        given = {name: value for name in _SAMPLED if (value := getattr(self, name, None)) is not None}
        if self.logit_bias:
            given["logit_bias"] = {_token_id(key): value for key, value in self.logit_bias.items()}
        stops = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        if len(stops) > MAX_STOPS:
            raise invalid(f"stop: at most {MAX_STOPS} texts", "stop", "invalid_value")
        given["stop"] = stops or None
        try:
            return replace(served.llm.default_params, max_tokens=max_tokens, logprobs=logprobs, **given)
        except SamplingError as error:
            raise of_error(error) from None


class Sampling(Sampled):
    """What both completion endpoints take."""

    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    stream_options: StreamOptions | None = None

    def wants_usage(self) -> bool:
        """Raises `Problem`."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options is only for stream=true", "stream_options", "invalid_value")
        return bool(self.stream_options and self.stream_options.include_usage)


_SAMPLED = (
    *("n", "seed", "temperature", "top_p", "presence_penalty", "frequency_penalty"),
    *("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos"),
)


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise invalid("logit_bias: its keys must be token ids", "logit_bias", "invalid_value")
    return int(key)


class PromptDetails(TypedDict):
    cached_tokens: int


class UsageDict(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


def usage_of(usages: Sequence[Sequence[Usage]]) -> UsageDict:
    """`usages` of every prompt's answers: a prompt counts once."""
    firsts = [of_prompt[0] for of_prompt in usages if of_prompt]
    prompt = sum(usage.prompt_tokens for usage in firsts)
    completion = sum(usage.completion_tokens for of_prompt in usages for usage in of_prompt)
    cached = sum(usage.stats.reused_tokens for usage in firsts)
    details = PromptDetails(cached_tokens=cached)
    return UsageDict(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion, prompt_tokens_details=details)
