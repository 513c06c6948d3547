"""One sequence: its known tokens and its computed tokens. There are no phases.

Only this module assigns the fields; other modules call methods (tests/test_forbidden_code.py checks this).
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import field
from time import perf_counter
from typing import TYPE_CHECKING, Union

from ...types import EngineStats, FinishReason, RequestStats, SamplingParams
from ...util.dataclass import dataclass

if TYPE_CHECKING:
    import mlx.core as mx

    from ...adapters.adapted_model import LoadedAdapter
    from ...models.hooks import Hooks
    from ...structured_output.constraint import Constraint
    from ...vision.inputs import PromptImages
    from ..text.chat_prompt import ChatPrompt
    from ..text.pooling import Pooling

    Proposed = Union[list[int], mx.array]
    """Drafts of one sequence: token ids on the host, or uint32 `[k]` on the device."""


IMAGE_FAILED = "images: "
"""Start of `Sequence.error` if an image could not be encoded."""
EXPERTS_FAILED = "experts: "
"""Start of `Sequence.error` if experts could not be read."""
ALL = 1 << 62
"""`Sequence.readable` of a sequence that waits for no image."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens below `num_computed_tokens` have their keys and values in the cache, or in a submitted step. Tokens below `num_tokens` are
    known: the host has read `tokens`, and at most one more, `pending_token`, is on the device only.
    """

    prompt: list[int]
    """Token ids."""
    params: SamplingParams
    """Sampling parameters; the engine ignores `n`, `seed`, `stop` and `max_tokens`."""
    seed: int
    """64 bits; with a token's position it determines that token's noise."""
    max_length: int
    """Maximum length: prompt plus `max_tokens`, within the context."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end it."""
    index: int = 0
    """Index among the samples of its request."""
    wants_logits: bool = False
    """True to report the logits of all its tokens and sample none."""
    samples_to_fork: list[Sequence] = field(default_factory=list)
    """Other samples of the same prompt, which fork from this one before its last prompt token is computed."""
    cache_salt: str = ""
    """Only sequences with the same salt share its pages."""
    client_id: str = ""
    """Clients are served evenly."""
    priority: int = 0
    """Lower is served first."""
    deadline: float | None = None
    """Time at which it ends with what it has, in seconds of `perf_counter`."""
    snapshot_points: tuple[int, ...] = ()
    """Lengths of the prompt, ascending, at which the computed prefix is cached: ends of messages."""
    constraint: Constraint | None = None
    """Constraint of the answer, advanced by the tokens of `answer`; None for free text."""
    chat: ChatPrompt | None = None
    """The prompt whose format divides the answer into reasoning, content and calls; None for plain text."""
    hooks: Hooks | None = None
    """Hooks that read or change the model's activations. Such a sequence goes through the model apart from others, and shares no pages with
    them."""
    adapter: LoadedAdapter | None = None
    """LoRA adapter; None for the plain model."""
    images: PromptImages | None = None
    """Images of the prompt, with the rows that they take; None for text."""

    pooling: Pooling | None = None
    """Pooling of its states to one vector, which is reported instead of tokens; None for answers and logits."""

    tokens: list[int] = field(init=False)
    """Prompt and answer, as far as the host has read them."""
    num_tokens: int = field(init=False)
    """Known tokens, including one that is on the device only."""
    num_computed_tokens: int = field(init=False, default=0)
    """Tokens whose keys and values are in the cache, or in a submitted step."""
    rope_length: int = field(init=False)
    """Length when its prompt was admitted, for rope variants that depend on the length."""
    awaited_token: tuple[mx.array, int] | None = field(init=False, default=None)
    """(uint32 tokens of a step, index of the last known one), if the host has not read it."""
    drafts: Proposed = field(init=False, default_factory=list)
    """Tokens proposed after the last known one, for the next step to verify."""
    readable: int = field(init=False, default=ALL)
    """Length up to which it can be computed now: to the first image without features."""
    arrival: int = 0
    """Place in the order of arrival, also after a preemption."""
    slot: int | None = field(init=False, default=None)
    """Slot in the cache; None while it waits and after its end."""
    finish_reason: FinishReason | None = field(init=False, default=None)
    """Reason of its end; None before."""
    error: str = field(init=False, default="")
    """The error, if `finish_reason` is "error"."""
    times: Times = field(init=False)
    reused_tokens: int = field(init=False, default=0)
    """Tokens of the prompt that were cached at admission."""
    cache_miss_reason: str = field(init=False, default="")
    """Reason why no more were cached."""
    drafted_tokens: int = field(init=False, default=0)
    """Verified drafts."""
    accepted_tokens: int = field(init=False, default=0)
    preemptions: int = field(init=False, default=0)
    images_cached: int = field(init=False, default=0)
    """Images that needed no tower at admission."""
    image_encode_s: float = field(init=False, default=0.0)
    """Seconds of the tower for its images."""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.num_tokens = self.rope_length = len(self.prompt)
        self.times = Times()

    @property
    def answer(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[len(self.prompt) :]

    def keys(self) -> list[int]:
        """Keys of the tokens for the prefix cache: token ids, and keys of their pixels for image rows."""
        return self.tokens if self.images is None else [*self.images.keys, *self.tokens[len(self.prompt) :]]

    @property
    def is_only_read(self) -> bool:
        """True if it is computed for logits or a vector, and no token is sampled."""
        return self.wants_logits or self.pooling is not None

    @property
    def pending_token(self) -> mx.array | None:
        """uint32 `[1]`: the last known token, if the host has not read it."""
        if self.awaited_token is None:
            return None
        tokens, row = self.awaited_token
        return tokens[row : row + 1]

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled; 0 if the last one is pending."""
        if self.finish_reason or (self.num_tokens >= self.max_length and not self.is_only_read):
            return 0
        return self.num_tokens - self.num_computed_tokens

    @property
    def fork_point(self) -> int:
        """Length at which a chunk must end, so that other samples can fork; 0 without other samples."""
        return len(self.prompt) - 1 if self.samples_to_fork else 0

    @property
    def can_fork(self) -> bool:
        """True if a chunk can end at the fork point: before it is a token, and no span of an image is divided."""
        end = len(self.prompt)
        return end > 1 and (self.images is None or not any(first < end - 1 < last for first, last in self.images.spans))

    def lead(self, samples: list[Sequence]) -> None:
        """Set the samples that fork from this one."""
        self.samples_to_fork = samples

    def arrive(self, arrival: int) -> None:
        """Set the place in the order of arrival."""
        self.arrival = arrival

    def attach(self, slot: int, reused: int = 0, miss: str = "") -> None:
        """Take a slot with the first `reused` tokens; `miss` is the reason why no more are cached."""
        self.slot, self.num_computed_tokens = slot, reused
        if not self.times.started:
            self.times.started = perf_counter()
            self.reused_tokens, self.cache_miss_reason = reused, miss

    def read_up_to(self, length: int) -> None:
        """Note that later tokens wait for the features of an image."""
        self.readable = length

    def count_cached_images(self, count: int) -> None:
        """Note how many images need no tower. Only the first admission counts."""
        if not (self.preemptions or self.image_encode_s):
            self.images_cached = count

    def count_encoding(self, seconds: float) -> None:
        """Add seconds of the tower for an image."""
        self.image_encode_s += seconds

    def attach_fork(self, leader: Sequence, slot: int) -> None:
        """Take a slot with all computed tokens of `leader`."""
        self.times.started = leader.times.started
        self.slot = slot
        self.num_computed_tokens = self.reused_tokens = leader.num_computed_tokens

    def restart(self) -> None:
        """Drop the slot, to compute everything again in another one, with the rope of the present length."""
        self.slot, self.num_computed_tokens = None, 0
        self.rope_length, self.awaited_token = self.num_tokens, None

    def preempt(self) -> None:
        """Drop the slot, to be attached again later."""
        self.detach()
        self.num_tokens, self.num_computed_tokens = len(self.tokens), 0
        self.awaited_token, self.drafts = None, []
        self.preemptions += 1

    def detach(self) -> None:
        """Drop the slot."""
        self.slot = None

    def propose(self, drafts: Proposed) -> None:
        """Set the drafts that the next step may verify."""
        self.drafts = drafts

    def advance(self, count: int) -> None:
        """Note that a submitted step computes `count` more tokens, drafts excluded. If it verifies drafts, the number of tokens is open
        until `append`."""
        self.num_computed_tokens += count
        self.awaited_token, self.drafts = None, []

    def follow(self, tokens: mx.array, row: int) -> None:
        """Note that the step submitted last samples its next token: `tokens[row]` of uint32 `[R]`."""
        self.awaited_token = tokens, row
        self.num_tokens += 1

    def append(self, tokens: Many[int], now: float, drafted: int = 0) -> int:
        """Append sampled tokens up to the one that ends the sequence, and return how many. `now`: seconds of `perf_counter`.

        With `drafted` drafts verified, all tokens but the last are accepted drafts, and what was computed of appended ones counts."""
        self.times.first_token = self.times.first_token or now
        self.times.last_token = now
        before = len(self.tokens)
        for token in tokens:
            if self.finish_reason:
                break
            if self.constraint is not None:
                self.error = self.constraint.fault or ("" if token in self.stop_ids else self.constraint.advance(token))
                if self.error:
                    self.finish_reason = "error"
                    break
            self.tokens.append(token)
            if token in self.stop_ids:
                self.finish_reason = "stop"
            elif len(self.tokens) >= self.max_length:
                self.finish_reason = "length"
        if len(self.tokens) >= self.num_tokens:
            self.num_tokens, self.awaited_token = len(self.tokens), None
        appended = len(self.tokens) - before
        if drafted and self.slot is not None:
            self.drafted_tokens += drafted
            self.accepted_tokens += len(tokens) - 1
            self.num_computed_tokens += max(appended, 1) - 1
        return appended

    def fail(self, error: str) -> None:
        """End the sequence with an error, unless it has ended."""
        if self.finish_reason is None:
            self.finish_reason, self.error = "error", error

    def finish(self, reason: FinishReason) -> None:
        """End the sequence, unless it has ended."""
        self.finish_reason = self.finish_reason or reason


@dataclass(slots=True)
class Times:
    """Times of events, in seconds of `perf_counter`; 0 before an event."""

    added: float = field(default_factory=perf_counter)
    """Creation of the sequence."""
    started: float = 0.0
    """First allocation of a slot."""
    first_token: float = 0.0
    """First token on the host."""
    last_token: float = 0.0
    """Latest token on the host."""


def request_stats(sequence: Sequence) -> RequestStats:
    """Statistics of the sequence so far. Times that have not started are zero."""
    times = sequence.times
    started = times.started or times.added
    first = times.first_token or started
    return RequestStats(
        queued_s=started - times.added,
        prefill_s=first - started,
        decode_s=max(times.last_token - first, 0.0),
        reused_tokens=sequence.reused_tokens,
        drafted_tokens=sequence.drafted_tokens,
        accepted_tokens=sequence.accepted_tokens,
        preemptions=sequence.preemptions,
        miss=sequence.cache_miss_reason,
        images=0 if (images := sequence.images) is None else len(images.images),
        image_tokens=0 if images is None else images.tokens,
        images_cached=sequence.images_cached,
        image_encode_s=sequence.image_encode_s,
        image_decode_s=0.0 if images is None else images.prepare_s,
        image_sizes=() if images is None else images.sizes,
    )


def ended_stats(sequence: Sequence) -> EngineStats:
    """The part of an ended sequence in its engine's totals."""
    stats = request_stats(sequence)
    return EngineStats(
        requests=1,
        prompt_tokens=len(sequence.prompt),
        completion_tokens=len(sequence.tokens) - len(sequence.prompt),
        reused_tokens=stats.reused_tokens,
        drafted_tokens=stats.drafted_tokens,
        accepted_tokens=stats.accepted_tokens,
        preemptions=stats.preemptions,
        queued_s=stats.queued_s,
        prefill_s=stats.prefill_s,
        decode_s=stats.decode_s,
        images=stats.images,
        image_tokens=stats.image_tokens,
        images_cached=stats.images_cached,
        image_encode_s=stats.image_encode_s,
    )
