"""Inputs and outputs of a generation: plain values without MLX.

The fields of `SamplingParams` have vLLM's names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field, fields, replace
from typing import Any, Literal, get_args

from .errors import SamplingError
from .structure import Structure
from .util.dataclass import dataclass

FinishReason = Literal["stop", "length", "loop", "cancelled", "timeout", "error"]

MAX_LOGPROBS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of sampling and stopping. Raises `SamplingError` for invalid values.

    `temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty` default to None: the recommendation of the model's authors
    (`LLM.default_params`), or greedy decoding without one. `stop_on_loop` defaults to False, and to True in conversations of a person. The
    other defaults do not depend on the model.
    """

    temperature: float | None = None
    """Divisor of the logits, 0 to 100; 0 is greedy and ignores `top_p`, `top_k` and `min_p`."""
    top_p: float | None = None
    """Keep the likeliest tokens up to this total probability, above 0 to 1; 1 keeps all."""
    top_k: int | None = None
    """Keep this many of the likeliest tokens; 0 or -1 keeps all."""
    min_p: float | None = None
    """Drop tokens below this fraction of the highest probability, 0 to 1; 0 drops none."""
    max_tokens: int | None = 256
    """Maximum tokens of the answer; None continues to the end of the context."""
    stop: str | tuple[str, ...] | list[str] | None = None
    """Texts that end the answer and are not part of it; stored as a tuple."""
    stop_token_ids: tuple[int, ...] | list[int] = ()
    """Token ids that end the answer, in addition to the model's EOS tokens."""
    seed: int | None = None
    """Seed; equal seeds give equal answers on one device. None draws a new seed per request."""
    n: int = 1
    """Number of answers to the prompt, 1 to 256."""
    logprobs: int | None = None
    """Return log-probabilities of each chosen token and of this many likeliest tokens (0 to 64), before temperature and penalties."""
    repetition_penalty: float | None = None
    """Divide positive and multiply negative logits of all tokens in prompt and answer; above 0 to 100, 1 is off."""
    presence_penalty: float = 0.0
    """Subtract from the logit of each token that the answer contains, -100 to 100."""
    frequency_penalty: float = 0.0
    """Subtract from a token's logit for each occurrence in the answer, -100 to 100."""
    logit_bias: Mapping[int, float] | None = None
    """Add to the logits of these token ids, -100 to 100."""
    ignore_eos: bool = False
    """Do not stop at the model's EOS tokens."""
    stop_on_loop: bool | None = None
    """End an answer whose last tokens are five copies of the same 20 to 512 tokens, with the reason "loop"."""
    thinking_token_budget: int | None = None
    """Maximum tokens of reasoning in a chat, 0 and up; None for no limit. Up to three more tokens may complete a character."""
    structure: Structure | None = None
    """Constraint of the answer: a `Schema`, `Regex`, `Choice` or `Lark`; None for free text. An answer that ends with "length" or at a stop
    string may be incomplete."""
    adapter: str | None = None
    """Name of an adapter of `LLM(..., adapters=)`; None for the base model."""

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
        for name in ("ignore_eos", "stop_on_loop"):
            value = getattr(self, name)
            if not isinstance(value, bool) and (value is not None or name not in NEUTRAL):
                raise SamplingError(f"{name} must be true or false, not {value!r}")
        if self.structure is not None:
            if not isinstance(self.structure, get_args(Structure)):
                raise SamplingError(f"structure must be a Schema, Regex, Choice or Lark, not a {type(self.structure).__name__}")
            if self.ignore_eos:
                raise SamplingError("ignore_eos cannot be combined with structure: the structure says where the answer ends")
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is always chosen."""
        return self.temperature == 0.0

    def resolved(self, defaults: SamplingParams | None = None) -> SamplingParams:
        """Return a copy with each None replaced by the value of `defaults` or, without one, by the neutral value."""
        missing: dict[str, Any] = {name: neutral for name, neutral in NEUTRAL.items() if getattr(self, name) is None}
        if not missing:
            return self
        if defaults is not None:
            missing = {name: neutral if (value := getattr(defaults, name)) is None else value for name, neutral in missing.items()}
        return replace(self, **missing)


NEUTRAL: Mapping[str, float | int] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "stop_on_loop": False,
}
"""Fields that may be None, with the values that leave the model's distribution and its answers unchanged."""


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
    """Token id."""
    text: str
    """Text of the token, with U+FFFD for an incomplete character."""
    logprob: float
    """Natural logarithm of the probability."""
    top: tuple[tuple[int, str, float], ...] = ()
    """Likeliest tokens at this position, in descending order: (token id, text, log-probability)."""


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Statistics of one request."""

    queued_s: float = 0.0
    """Seconds in the queue."""
    prefill_s: float = 0.0
    """Seconds of prefill."""
    decode_s: float = 0.0
    """Seconds from the first token to the last."""
    reused_tokens: int = 0
    """Prompt tokens whose keys and values were cached."""
    drafted_tokens: int = 0
    """Number of drafted tokens."""
    accepted_tokens: int = 0
    """Number of accepted drafts."""
    preemptions: int = 0
    """Number of preemptions: the pages went to other requests and were computed again."""
    miss: str = ""
    """Reason for incomplete reuse of the prompt, such as "diverged at token 312, message 3"; "" if all was reused."""
    images: int = 0
    """Number of images of the prompt."""
    image_tokens: int = 0
    """Prompt tokens that are image rows."""
    images_cached: int = 0
    """Images that needed no vision tower: in the reused prefix, or with cached features."""
    image_encode_s: float = 0.0
    """Seconds of the vision tower, for images of this request; a shared image counts for each."""
    image_decode_s: float = 0.0
    """Seconds of decoding and resizing the images, before the queue."""
    image_sizes: tuple[tuple[tuple[int, int], tuple[int, int]], ...] = ()
    """(width, height) of each picture, and of the image that the model sees: coordinates in an answer may refer to the second."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Totals of all finished requests, and the present state of an engine."""

    requests: int = 0
    """Number of finished requests."""
    prompt_tokens: int = 0
    """Tokens of prompts."""
    completion_tokens: int = 0
    """Tokens of answers."""
    reused_tokens: int = 0
    """Prompt tokens whose keys and values were cached."""
    drafted_tokens: int = 0
    """Number of drafted tokens."""
    accepted_tokens: int = 0
    """Number of accepted drafts."""
    preemptions: int = 0
    """Number of preemptions."""
    queued_s: float = 0.0
    """Seconds in the queue, summed over requests."""
    prefill_s: float = 0.0
    """Seconds of prefill, summed over requests."""
    decode_s: float = 0.0
    """Seconds of decode, summed over requests."""
    images: int = 0
    """Number of images in prompts."""
    image_tokens: int = 0
    """Prompt tokens that are image rows."""
    images_cached: int = 0
    """Images that needed no vision tower: in the reused prefix, or with cached features."""
    image_encode_s: float = 0.0
    """Seconds of the vision tower, summed over requests."""
    expert_bytes_read: int = 0
    """Bytes of routed experts that were read from the disk."""
    expert_hits: int = 0
    """Chosen experts that were in memory, if not all of them are. An expert counts once for each layer and step that chooses it."""
    expert_misses: int = 0
    """Chosen experts that were not in memory."""
    expert_wait_s: float = 0.0
    """Seconds in which steps waited for experts from the disk."""
    steps: int = 0
    """Number of computed steps."""
    restarts: int = 0
    """Number of restarts after a failure."""
    running: int = 0
    """Running sequences."""
    waiting: int = 0
    """Waiting sequences."""
    pages: int = 0
    """Capacity of the pool in pages of 64 tokens, in layers without a window."""
    pages_used: int = 0
    """Pages used by running sequences."""
    pages_cached: int = 0
    """Pages cached for reuse that no sequence uses."""
    experts: int = 0
    """Routed experts of all layers, if not all of them are in memory."""
    expert_slots: int = 0
    """Routed experts that are in memory at once."""

    @property
    def expert_hit_rate(self) -> float:
        """Share of chosen experts that were in memory; 1 if all are."""
        return self.expert_hits / (self.expert_hits + self.expert_misses) if self.expert_misses else 1.0

    @property
    def computed_tokens(self) -> int:
        """Tokens of finished requests that were computed: without those found in the cache."""
        return self.prompt_tokens - self.reused_tokens + self.completion_tokens

    def without_experts(self) -> EngineStats:
        """Return a copy without the reads of experts, which the next engine of the same model counts too."""
        return replace(self, expert_bytes_read=0, expert_hits=0, expert_misses=0, expert_wait_s=0.0)

    def __add__(self, later: EngineStats) -> EngineStats:
        """Return the sums of both, with the present state of `later`."""
        return replace(later, **{name: getattr(self, name) + getattr(later, name) for name in _SUMS})


_NOW = frozenset({"restarts", "running", "waiting", "pages", "pages_used", "pages_cached", "experts", "expert_slots"})
_SUMS = tuple(each.name for each in fields(EngineStats) if each.name not in _NOW)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens, times and memory of one answer."""

    prompt_tokens: int
    """Tokens of the prompt."""
    completion_tokens: int
    """Tokens of the answer, with EOS."""
    ttft_s: float = 0.0
    """Seconds from the call to the first token."""
    prefill_tps: float = 0.0
    """Computed prompt tokens per second, without reused ones."""
    decode_tps: float = 0.0
    """Tokens per second after the first one."""
    peak_memory_bytes: int = 0
    """Peak memory of the process since its start, in bytes."""
    stats: RequestStats = field(default_factory=RequestStats)
    """Statistics of the request in the engine."""
    reasoning_tokens: int = 0
    """Tokens of the answer up to the end of its reasoning; 0 without reasoning."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of a model."""

    id: str
    """Id of the call, to which the tool's result refers."""
    name: str
    """Name of the tool."""
    arguments: str
    """JSON text of an object as generated. It is incomplete if the answer ended inside the call ("length"). It fits the tool's schema only
    if the request constrained the call."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a streamed call."""

    index: int
    """Index of the call in the answer, from 0."""
    arguments: str = ""
    """Next piece of the JSON text of the arguments."""
    id: str | None = None
    """See `ToolCall`; only in the first piece of a call."""
    name: str | None = None
    """See `ToolCall`; only in the first piece of a call."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished answer."""

    text: str
    """Answer without the stop string and, in a chat, without reasoning and tool calls."""
    token_ids: list[int]
    """Token ids of the answer."""
    finish_reason: FinishReason
    """One of "stop" (EOS or a stop string), "length" (`max_tokens` or the context), "loop" (`stop_on_loop`), "timeout", "cancelled" or
    "error"."""
    usage: Usage
    """Tokens, times and memory."""
    logprobs: list[TokenLogprob] | None = None
    """One entry per token id, if `SamplingParams.logprobs` is set."""
    index: int = 0
    """Index among the `n` answers to the prompt, from 0."""
    stop_string: str | None = None
    """Stop string that ended the answer; not part of `text`."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """One entry per prompt token from the second, for requests that score a prompt instead of answering."""
    reasoning: str | None = None
    """Reasoning before a chat's answer; None without reasoning."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Tool calls of a chat's answer, in order."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a streamed answer."""

    text: str
    """Next text; may be empty while a character or a possible stop string is incomplete."""
    token_ids: list[int] = field(default_factory=list)
    """Ids of the tokens of the text."""
    logprobs: list[TokenLogprob] | None = None
    """One entry per token id, if `SamplingParams.logprobs` is set."""
    finish_reason: FinishReason | None = None
    """Reason for the end; only on an answer's last chunk."""
    usage: Usage | None = None
    """Usage of the answer; only on its last chunk."""
    index: int = 0
    """Index among the `n` answers to the prompt, from 0."""
    stop_string: str | None = None
    """Stop string that ended the answer; only on its last chunk."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """See `Completion`, for the tokens since the last chunk."""
    reasoning: str = ""
    """Next piece of the reasoning in a chat."""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    """Pieces of tool calls in a chat."""

    def __str__(self) -> str:
        return self.text
