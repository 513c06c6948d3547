"""What goes into a generation and what comes out: plain values, no MLX.

The fields of `SamplingParams` are named as in vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from .errors import SamplingError

FinishReason = Literal["stop", "length", "cancelled", "timeout"]

MAX_LOGPROBS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the next token, and when to stop.

    `temperature=0` is greedy. `top_k=0` (or -1) and `top_p=1` are off. `max_tokens=None` generates to the end of the context.
    `logprobs=k` returns the log-probability of each chosen token and of the `k` likeliest, before temperature and penalties.
    `repetition_penalty` divides (or multiplies, where negative) the logits of every token of prompt and answer;
    `presence_penalty` and `frequency_penalty` subtract, for tokens of the answer only. Raises `SamplingError`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 256
    stop: str | tuple[str, ...] | list[str] | None = None
    stop_token_ids: tuple[int, ...] | list[int] = ()
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            _check_number(name, getattr(self, name), low, high)
        for name, low, high in _INT_RANGES:
            value = getattr(self, name)
            if value is not None:
                _check_int(name, value, low, high)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise SamplingError(f"ignore_eos must be true or false, not {self.ignore_eos!r}")
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


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
    if not isinstance(strings, (tuple, list)) or not all(isinstance(s, str) and s for s in strings):
        raise SamplingError(f"stop must be a non-empty string or a list of them, not {stop!r}")
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
    """One generated token: its id, text, natural-log probability, and the likeliest alternatives as (id, text, logprob)."""

    token_id: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestStats:
    """What a request took: seconds waiting, reading its prompt and writing its answer; tokens whose keys and values were cached already
    (`miss` says why not more), tokens drafted and those of them that were right; how often it gave its pages to others."""

    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    reused_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    miss: str = ""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Sums over all requests that have ended, and what there is now. Pages are counted in the layers without a window."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reused_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    steps: int = 0
    restarts: int = 0
    running: int = 0
    waiting: int = 0
    pages: int = 0
    pages_used: int = 0
    pages_cached: int = 0

    def __add__(self, later: EngineStats) -> EngineStats:
        """Sums of both; what there is now is what `later` says."""
        return replace(later, **{name: getattr(self, name) + getattr(later, name) for name in _SUMS})


_NOW = frozenset({"restarts", "running", "waiting", "pages", "pages_used", "pages_cached"})
_SUMS = tuple(each.name for each in fields(EngineStats) if each.name not in _NOW)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request, its times in seconds, tokens per second, and the most bytes held since the process began."""

    prompt_tokens: int
    completion_tokens: int
    ttft_s: float = 0.0
    prefill_tps: float = 0.0
    decode_tps: float = 0.0
    peak_memory_bytes: int = 0
    stats: RequestStats = field(default_factory=RequestStats)

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished answer. `index` counts the samples of one prompt when `n > 1`; `stop_string` is the one that ended it."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    logprobs: list[TokenLogprob] | None = None
    index: int = 0
    stop_string: str | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    """For each token of the prompt from the second on, where the request asked for that instead of an answer."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a streamed answer. The last one has a `finish_reason`, the `usage`, and the `stop_string` if there was one; its text may
    be empty."""

    text: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    index: int = 0
    stop_string: str | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    """As in `Completion`, for the tokens that were read since the last chunk."""
