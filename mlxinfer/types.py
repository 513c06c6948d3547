"""What goes into a generation and what comes out: plain values, no MLX.

The fields of `SamplingParams` are named as in vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field, fields, replace
from typing import Any, Literal, get_args

from .errors import SamplingError
from .structure import Structure
from .util.dataclass import dataclass

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]

MAX_LOGPROBS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the next token, and when to stop. Raises `SamplingError` for a value that has no meaning.

    `temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty` may be left out (None): then they are what the model's authors
    recommend (`LLM.default_params`), or greedy where they recommend nothing. The other fields do not depend on the model.
    """

    temperature: float | None = None
    """Divides the logits, from 0 to 100; 0 is greedy: always the likeliest token, whatever `top_p`, `top_k` and `min_p` say."""
    top_p: float | None = None
    """Keep the likeliest tokens up to this probability together, above 0 to 1; 1 keeps all."""
    top_k: int | None = None
    """Keep this many of the likeliest tokens; 0 or -1 keeps all."""
    min_p: float | None = None
    """Drop tokens below this share of the likeliest one's probability, from 0 to 1; 0 drops none."""
    max_tokens: int | None = 256
    """Length of the answer in tokens, at most; None goes on to the end of the context."""
    stop: str | tuple[str, ...] | list[str] | None = None
    """Texts that end the answer and are not part of it. Read back as a tuple."""
    stop_token_ids: tuple[int, ...] | list[int] = ()
    """Token ids that end the answer, in addition to the model's own."""
    seed: int | None = None
    """The same seed gives the same answer, on the same device; None takes a new one for each request."""
    n: int = 1
    """Answers to the same prompt, 1 to 256."""
    logprobs: int | None = None
    """Return the log-probability of each chosen token and of this many of the likeliest (0 to 64), before temperature and penalties."""
    repetition_penalty: float | None = None
    """Divides positive logits, and multiplies negative ones, of every token of prompt and answer; above 0 to 100, 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that the answer has already, -100 to 100."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that the answer has it already, -100 to 100."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids, -100 to 100."""
    ignore_eos: bool = False
    """Do not stop at the model's end tokens."""
    thinking_token_budget: int | None = None
    """In a chat with a model that thinks before it answers: tokens of that, at most, 0 and up; then it has to answer. A character is never
    cut, which may take up to three more. None sets no limit."""
    structure: Structure | None = None
    """What the answer is held to: a `Schema`, `Regex`, `Choice` or `Lark`; None for free text. An answer that ends with "length" or at a
    stop string may be incomplete."""
    adapter: str | None = None
    """The adapter that answers, by a name that `LLM(..., adapters=)` was given; None for the model as it is."""

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None or name not in NEUTRAL:
                _check_number(name, value, low, high)
        for name, low, high in _INT_RANGES:
            value = getattr(self, name)
            if value is not None:
                _check_int(name, value, low, high)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.adapter is not None and not isinstance(self.adapter, str):
            raise SamplingError(f"adapter must be a name that adapters= was given, not {self.adapter!r}")
        if not isinstance(self.ignore_eos, bool):
            raise SamplingError(f"ignore_eos must be true or false, not {self.ignore_eos!r}")
        if self.structure is not None:
            if not isinstance(self.structure, get_args(Structure)):
                raise SamplingError(f"structure must be a Schema, Regex, Choice or Lark, not a {type(self.structure).__name__}")
            if self.ignore_eos:
                raise SamplingError("ignore_eos cannot be combined with structure: the structure says where the answer ends")
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always chosen."""
        return self.temperature == 0.0

    def resolved(self, defaults: SamplingParams | None = None) -> SamplingParams:
        """These with every field that was left out set: as in `defaults`, or neutral where those leave it out too."""
        missing: dict[str, Any] = {name: neutral for name, neutral in NEUTRAL.items() if getattr(self, name) is None}
        if not missing:
            return self
        if defaults is not None:
            missing = {name: neutral if (value := getattr(defaults, name)) is None else value for name, neutral in missing.items()}
        return replace(self, **missing)


NEUTRAL: Mapping[str, float | int] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""The fields that may be left out, with the values that change nothing about the model's own distribution."""


_RANGES = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.0, 100.0),
    ("presence_penalty", -100.0, 100.0),
    ("frequency_penalty", -100.0, 100.0),
)
_INT_RANGES = (
    ("top_k", -1, 2**31 - 1),
    ("max_tokens", 1, 2**31 - 1),
    ("seed", -(2**63), 2**64 - 1),
    ("n", 1, 256),
    ("logprobs", 0, MAX_LOGPROBS),
    ("thinking_token_budget", 0, 2**31 - 1),
)
_POSITIVE = frozenset({"top_p", "repetition_penalty"})


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise SamplingError(f"{name} must be a finite number, not {value!r}")
    if not low <= value <= high or (name in _POSITIVE and value == 0):
        bracket = "above" if name in _POSITIVE else "from"
        raise SamplingError(f"{name} must be {bracket} {low:g} to {high:g}, not {value!r}")


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SamplingError(f"{name} must be a whole number, not {value!r}")
    if not low <= value <= high:
        raise SamplingError(f"{name} must be from {low} to {high}, not {value}")


def _stop_strings(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, (tuple, list)) or not all(isinstance(text, str) for text in strings):
        raise SamplingError(f"stop must be a text or a list of texts, not {stop!r}")
    if not all(strings):
        raise SamplingError("stop must not be empty")
    return tuple(strings)


def _token_ids(name: str, ids: object) -> tuple[int, ...]:
    if not isinstance(ids, (tuple, list)) or not all(type(i) is int and i >= 0 for i in ids):
        raise SamplingError(f"{name} must be a list of token ids, not {ids!r}")
    return tuple(ids)


def _logit_bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise SamplingError(f"logit_bias must map token ids to numbers, not {bias!r}")
    clean: dict[int, float] = {}
    for key, value in bias.items():
        if type(key) is not int or key < 0:
            raise SamplingError(f"logit_bias: {key!r} is not a token id")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -100 <= value <= 100:
            raise SamplingError(f"logit_bias of token {key} must be from -100 to 100, not {value!r}")
        clean[key] = float(value)
    return clean


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its log-probability."""

    token_id: int
    """The token's id."""
    text: str
    """The token's text; replacement characters stand for parts of a character."""
    logprob: float
    """Natural logarithm of its probability."""
    top: tuple[tuple[int, str, float], ...] = ()
    """The likeliest tokens at its place, likeliest first, as (token id, text, natural-log probability)."""


@dataclass(frozen=True, slots=True)
class RequestStats:
    """What one request took."""

    queued_s: float = 0.0
    """Seconds it waited before it ran."""
    prefill_s: float = 0.0
    """Seconds in which its prompt was read."""
    decode_s: float = 0.0
    """Seconds from its first token to its last."""
    reused_tokens: int = 0
    """Tokens of the prompt whose keys and values were cached already."""
    drafted_tokens: int = 0
    """Tokens that were drafted for it."""
    accepted_tokens: int = 0
    """Drafted tokens that were right."""
    preemptions: int = 0
    """How often it gave its pages to other requests, and was computed again."""
    miss: str = ""
    """Why not more of the prompt was reused, such as "diverged at token 312, message 3"; empty if all of it was."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What all ended requests took together, and what an engine does at the moment."""

    requests: int = 0
    """Requests that have ended."""
    prompt_tokens: int = 0
    """Tokens of their prompts."""
    completion_tokens: int = 0
    """Tokens of their answers."""
    reused_tokens: int = 0
    """Prompt tokens whose keys and values were cached already."""
    drafted_tokens: int = 0
    """Tokens that were drafted."""
    accepted_tokens: int = 0
    """Drafted tokens that were right."""
    preemptions: int = 0
    """How often a request gave its pages to others."""
    queued_s: float = 0.0
    """Seconds that requests waited, summed."""
    prefill_s: float = 0.0
    """Seconds in which prompts were read, summed over requests."""
    decode_s: float = 0.0
    """Seconds in which answers were written, summed over requests."""
    steps: int = 0
    """Steps that the engine has computed."""
    restarts: int = 0
    """How often the engine failed and began anew."""
    running: int = 0
    """Sequences that run now."""
    waiting: int = 0
    """Sequences that wait now."""
    pages: int = 0
    """Pages of 64 tokens that the pool can hold, in layers without a window."""
    pages_used: int = 0
    """Pages that running sequences hold now."""
    pages_cached: int = 0
    """Pages that are kept for reuse now, and held by no sequence."""

    def __add__(self, later: EngineStats) -> EngineStats:
        """The sums of both; what describes the moment is taken from `later`."""
        return replace(later, **{name: getattr(self, name) + getattr(later, name) for name in _SUMS})


_NOW = frozenset({"restarts", "running", "waiting", "pages", "pages_used", "pages_cached"})
_SUMS = tuple(each.name for each in fields(EngineStats) if each.name not in _NOW)


@dataclass(frozen=True, slots=True)
class Usage:
    """What one answer took: tokens, times, memory."""

    prompt_tokens: int
    """Tokens of the prompt."""
    completion_tokens: int
    """Tokens of the answer, the end token included."""
    ttft_s: float = 0.0
    """Seconds from the call to the first token."""
    prefill_tps: float = 0.0
    """Prompt tokens computed per second; those that were reused do not count."""
    decode_tps: float = 0.0
    """Tokens per second after the first one."""
    peak_memory_bytes: int = 0
    """The most bytes that the process has held since it began."""
    stats: RequestStats = field(default_factory=RequestStats)
    """What the request took in the engine."""
    reasoning_tokens: int = 0
    """Tokens of the answer up to the end of the model's reasoning; 0 if there was none."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool, as a model asks for it."""

    id: str
    """Names the call in the conversation; the tool's answer refers to it."""
    name: str
    """The tool's name."""
    arguments: str
    """JSON text of an object, as the model wrote it. It is complete, unless the answer broke off inside the call ("length"), and fits the
    tool's schema only where the request held it to it."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a streamed call."""

    index: int
    """Which of the answer's calls it belongs to, from 0."""
    arguments: str = ""
    """Further JSON text: the pieces of a call joined are its arguments."""
    id: str | None = None
    """As in `ToolCall`; with the first piece of a call only."""
    name: str | None = None
    """As in `ToolCall`; with the first piece of a call only."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished answer."""

    text: str
    """The answer, without the stop string. In a chat, without reasoning and calls of tools."""
    token_ids: list[int]
    """Ids of its tokens."""
    finish_reason: FinishReason
    """One of "stop" (an end token or a stop string), "length" (`max_tokens` or the context), "timeout", "cancelled" or "error"."""
    usage: Usage
    """Tokens, times and memory."""
    logprobs: list[TokenLogprob] | None = None
    """An entry for each of `token_ids`, if `SamplingParams.logprobs` asked for them."""
    index: int = 0
    """Which of the `n` answers to its prompt it is, from 0."""
    stop_string: str | None = None
    """The stop string that ended it, which is not in `text`."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """For each token of the prompt from the second on, where the request asked for that instead of an answer."""
    reasoning: str | None = None
    """In a chat, what the model thought before it answered; None if it did not."""
    tool_calls: tuple[ToolCall, ...] = ()
    """In a chat with tools, the calls that the model asks for, in order."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a streamed answer."""

    text: str
    """May be empty, while a character or a possible stop string is incomplete."""
    token_ids: list[int] = field(default_factory=list)
    """Ids of the tokens that its text comes from."""
    logprobs: list[TokenLogprob] | None = None
    """An entry for each of `token_ids`, if `SamplingParams.logprobs` asked for them."""
    finish_reason: FinishReason | None = None
    """Why the answer ended; None on every chunk but the last one of an answer."""
    usage: Usage | None = None
    """What the answer took; on its last chunk only."""
    index: int = 0
    """Which of the `n` answers to its prompt it belongs to, from 0."""
    stop_string: str | None = None
    """The stop string that ended the answer; on its last chunk only."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """As in `Completion`, for the tokens that were read since the last chunk."""
    reasoning: str = ""
    """In a chat, a further piece of the model's reasoning."""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    """In a chat with tools, pieces of calls."""

    def __str__(self) -> str:
        return self.text
