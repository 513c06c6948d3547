"""The keywords of requests: serving, sampling and chat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field, fields, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

from ..config import unknown_keyword
from ..errors import SamplingError
from ..structure import Structure
from ..types import SamplingParams
from ..util.dataclass import dataclass

if TYPE_CHECKING:
    from ..tools import OfferedTool, ToolChoice

_LONGEST_NAME = 256
_MOST_SECONDS = 10 * 365 * 86400.0
_PRIORITIES = range(-(2**31), 2**31)
_SAMPLING = frozenset(each.name for each in fields(SamplingParams))

Given = TypeVar("Given")


class RequestKeywords(TypedDict, total=False):
    """The keywords of every request: the fields of `RequestOptions`."""

    client_id: str
    priority: int
    timeout_s: float | None
    adapter: str | None
    cache_salt: str


class GenerateKeywords(RequestKeywords, total=False):
    """The keywords of a request to generate: those of every request, and the fields of `SamplingParams`."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    max_tokens: int | None
    stop: str | tuple[str, ...] | list[str] | None
    stop_token_ids: tuple[int, ...] | list[int]
    seed: int | None
    n: int
    logprobs: int | None
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    ignore_eos: bool
    stop_on_loop: bool | None
    thinking_token_budget: int | None
    structure: Structure | None


class ChatKeywords(TypedDict, total=False):
    """The keywords of a chat prompt, beyond its messages; `InputProcessor.chat` has their defaults."""

    tools: Iterable[OfferedTool] | None
    tool_choice: str | ToolChoice
    parallel_tool_calls: bool
    template_vars: Mapping[str, Any] | None
    images: Iterable[Any]


class ChatRequestKeywords(ChatKeywords, GenerateKeywords, total=False):
    """The keywords of a chat request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Keywords for serving a request among others. Raises `SamplingError` for values that have no meaning."""

    client_id: str = ""
    """Name of the client, up to 256 characters: clients are served evenly."""
    priority: int = 0
    """Priority, a whole number of 32 bits: lower is served first."""
    timeout_s: float | None = None
    """Seconds from now, after which an answer ends with what it has, and `finish_reason` "timeout"; None waits for its end."""
    adapter: str | None = None
    """The adapter by name; None takes that of the request's `SamplingParams`, if it has some."""
    cache_salt: str = ""
    """Cached prompts are shared only with requests of the same salt, of up to 256 characters: a secret keeps them from all others."""
    deadline: float | None = field(init=False, default=None)
    """The deadline in seconds of `perf_counter`."""

    def __post_init__(self) -> None:
        if not isinstance(self.client_id, str) or len(self.client_id) > _LONGEST_NAME:
            raise SamplingError(f"client_id must be a text of up to {_LONGEST_NAME} characters")
        if not isinstance(self.cache_salt, str) or len(self.cache_salt) > _LONGEST_NAME:
            raise SamplingError(f"cache_salt must be a text of up to {_LONGEST_NAME} characters")
        if isinstance(self.priority, bool) or not isinstance(self.priority, int) or self.priority not in _PRIORITIES:
            raise SamplingError(f"priority must be a whole number of 32 bits, not {self.priority!r}")
        if self.timeout_s is None:
            return
        number = isinstance(self.timeout_s, (int, float)) and not isinstance(self.timeout_s, bool)
        if not number or not 0 < self.timeout_s <= _MOST_SECONDS:
            raise SamplingError(f"timeout_s must be a number of seconds above 0, not {self.timeout_s!r}")
        object.__setattr__(self, "deadline", perf_counter() + self.timeout_s)

    @classmethod
    def of(cls, method: str, keywords: RequestKeywords) -> RequestOptions:
        """Options of a request that samples no tokens. Raises `UnknownKeywordError` for any other keyword."""
        known = RequestKeywords.__annotations__
        for name in keywords:
            if name not in known:
                advice = "no token is sampled here" if name in _SAMPLING else ""
                raise unknown_keyword(f"{method}()", name, list(known), advice)
        return cls(**keywords)


def generating(method: str, params: Given, keywords: GenerateKeywords) -> tuple[Given, RequestOptions]:
    """Sampling parameters and options of a request to generate, from a method's `params` and its other keywords.

    A keyword wins over the same field of `params`, which are `SamplingParams`, a list of them or None. Raises `SamplingError` for a wrong
    value, and `UnknownKeywordError` for a keyword that is neither an option nor a field."""
    known, given = RequestKeywords.__annotations__, cast("dict[str, Any]", keywords)
    sampling = {name: value for name, value in given.items() if name in _SAMPLING and name not in known}
    for name in given.keys() - known.keys() - sampling.keys():
        names, advice = [*GenerateKeywords.__annotations__], ""
        if "chat" in method:
            names += ChatKeywords.__annotations__
            advice = f"a variable of the chat template is given as template_vars={{{name!r}: {given[name]!r}}}"
        raise unknown_keyword(f"{method}()", name, names, advice)
    options = {name: value for name, value in given.items() if name not in sampling}
    return (_sampled(params, sampling) if sampling else params), RequestOptions(**options)


def chatting(method: str, params: Given, keywords: ChatRequestKeywords) -> tuple[ChatKeywords, Given, RequestOptions]:
    """`generating` for a chat request, with the keywords of its prompt. Raises the same errors."""
    given = cast("dict[str, Any]", keywords)
    chat = {name: value for name, value in given.items() if name in ChatKeywords.__annotations__}
    others = {name: value for name, value in given.items() if name not in chat}
    return cast("ChatKeywords", chat), *generating(method, params, cast("GenerateKeywords", others))


def _sampled(params: Any, sampling: dict[str, Any]) -> Any:
    """`params` with these fields replaced. Wrong types stay as they are: `InputProcessor.params` refuses them by name."""
    if params is None:
        return SamplingParams(**sampling)
    if isinstance(params, (list, tuple)):
        return [_sampled(each, sampling) for each in params]
    return replace(params, **sampling) if isinstance(params, SamplingParams) else params
