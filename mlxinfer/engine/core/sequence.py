"""One sequence being generated: how far it is known, and how far it is computed. There are no phases.

Only this module assigns the fields; every other one calls the verbs (tests/test_forbidden_code.py checks this).
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
    from ..text.chat_prompt import ChatPrompt
    from ..text.pooling import Pooling

    Proposed = Union[list[int], mx.array]
    """Drafts of one sequence: token ids on the host, or uint32 `[k]` on the device."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens `0 .. num_computed_tokens` have their keys and values in the cache, or in a step that was submitted. Tokens up to
    `num_tokens` are known: the host has read `tokens`, and at most one more, `pending_token`, is on the device only.
    """

    prompt: list[int]
    """Token ids."""
    params: SamplingParams
    """How its tokens are chosen; the engine does not look at `n`, `seed`, `stop` and `max_tokens`."""
    seed: int
    """64 bits; with a token's position it makes that token's noise."""
    max_length: int
    """Tokens at which it ends: prompt plus `max_tokens`, within the context."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end it."""
    index: int = 0
    """Which of a request's samples it is."""
    wants_logits: bool = False
    """Logits of all its tokens are reported, and none is sampled."""
    samples_to_fork: list[Sequence] = field(default_factory=list)
    """Further samples of the same prompt: they fork from this one before its last prompt token is computed."""
    cache_salt: str = ""
    """Its pages are shared only with sequences of the same salt."""
    client_id: str = ""
    """Clients get their turns evenly."""
    priority: int = 0
    """Lower is served first."""
    deadline: float | None = None
    """When it ends with what it has, in seconds of `perf_counter`."""
    snapshot_points: tuple[int, ...] = ()
    """Lengths of the prompt, ascending, at which a message ends: what is computed up to there is kept for reuse."""
    constraint: Constraint | None = None
    """What the answer is held to; it has taken the tokens of `answer`. None for free text."""
    chat: ChatPrompt | None = None
    """How the answer is told apart into reasoning, content and calls; None for plain text."""
    hooks: Hooks | None = None
    """What looks into the model while it computes this sequence, or changes it: it goes through the model without the others then, and
    shares no pages with them. None for nothing."""
    adapter: LoadedAdapter | None = None
    """What changes the model's projections for it; None for the model as it is."""

    pooling: Pooling | None = None
    """How its states become one vector, which is reported; no token is sampled then. None for answers and for logits."""

    tokens: list[int] = field(init=False)
    """Prompt and answer, as far as the host has read them."""
    num_tokens: int = field(init=False)
    """Known tokens, with the one that is on the device only."""
    num_computed_tokens: int = field(init=False, default=0)
    """Tokens whose keys and values are in the cache, or in a step that was submitted."""
    rope_length: int = field(init=False)
    """Tokens of the sequence when its prompt was admitted; rope variants that depend on the length go by it."""
    awaited_token: tuple[mx.array, int] | None = field(init=False, default=None)
    """uint32 tokens of a step, and which of them is the last known one, if the host has not read it."""
    drafts: Proposed = field(init=False, default_factory=list)
    """Tokens proposed after the last known one, for the next step to verify."""
    arrival: int = 0
    """Its place in the order of arrival, which it keeps when it is preempted."""
    slot: int | None = field(init=False, default=None)
    """Its place in the cache; None while it waits and after it has ended."""
    finish_reason: FinishReason | None = field(init=False, default=None)
    """Why it ended; None while it has not."""
    error: str = field(init=False, default="")
    """What was wrong, if it ended with "error"."""
    times: Times = field(init=False)
    """When what happened to it."""
    reused_tokens: int = field(init=False, default=0)
    """Tokens of the prompt that the cache had when the sequence was admitted."""
    cache_miss_reason: str = field(init=False, default="")
    """Why they were not more."""
    drafted_tokens: int = field(init=False, default=0)
    """Drafts that were verified."""
    accepted_tokens: int = field(init=False, default=0)
    """Drafts that held."""
    preemptions: int = field(init=False, default=0)
    """How often it gave its pages to others."""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.num_tokens = self.rope_length = len(self.prompt)
        self.times = Times()

    @property
    def answer(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[len(self.prompt) :]

    @property
    def is_only_read(self) -> bool:
        """Whether what is computed of its prompt is all that is wanted of it."""
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
        """Tokens left to compute before the next one can be sampled; 0 when the last one is on its way."""
        if self.finish_reason or (self.num_tokens >= self.max_length and not self.is_only_read):
            return 0
        return self.num_tokens - self.num_computed_tokens

    @property
    def fork_point(self) -> int:
        """Length at which a chunk has to end so that other samples can fork there; 0 if none will."""
        return len(self.prompt) - 1 if self.samples_to_fork else 0

    def lead(self, samples: list[Sequence]) -> None:
        """Have these samples fork from this one, or with an empty list none."""
        self.samples_to_fork = samples

    def arrive(self, arrival: int) -> None:
        """Take a place in the order of arrival."""
        self.arrival = arrival

    def attach(self, slot: int, reused: int = 0, miss: str = "") -> None:
        """Take a slot that holds the first `reused` tokens; `miss` says why not more."""
        self.slot, self.num_computed_tokens = slot, reused
        if not self.times.started:
            self.times.started = perf_counter()
            self.reused_tokens, self.cache_miss_reason = reused, miss

    def attach_fork(self, leader: Sequence, slot: int) -> None:
        """Take a slot that holds all that `leader` has computed."""
        self.times.started = leader.times.started
        self.slot = slot
        self.num_computed_tokens = self.reused_tokens = leader.num_computed_tokens

    def restart(self) -> None:
        """Give the slot up, to compute everything again in another one, rotated for its present length."""
        self.slot, self.num_computed_tokens = None, 0
        self.rope_length, self.awaited_token = self.num_tokens, None

    def preempt(self) -> None:
        """Give the slot up, to be attached again later."""
        self.detach()
        self.num_tokens, self.num_computed_tokens = len(self.tokens), 0
        self.awaited_token, self.drafts = None, []
        self.preemptions += 1

    def detach(self) -> None:
        """Give the slot up."""
        self.slot = None

    def propose(self, drafts: Proposed) -> None:
        """Set the drafts that the next step may verify."""
        self.drafts = drafts

    def advance(self, count: int) -> None:
        """A step was submitted that computes `count` more tokens, drafts not counted. Where it verifies drafts, the number of tokens stays
        open until `append`."""
        self.num_computed_tokens += count
        self.awaited_token, self.drafts = None, []

    def follow(self, tokens: mx.array, row: int) -> None:
        """The step that was submitted last samples its next token: one of these, uint32 `[R]`."""
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

    def finish(self, reason: FinishReason) -> None:
        """End it, unless it has ended."""
        self.finish_reason = self.finish_reason or reason


@dataclass(slots=True)
class Times:
    """When what happened, in seconds of `perf_counter`; 0 if it has not happened."""

    added: float = field(default_factory=perf_counter)
    """The sequence was made."""
    started: float = 0.0
    """It got a slot for the first time."""
    first_token: float = 0.0
    """Its first token was read."""
    last_token: float = 0.0
    """Its latest token was read."""


def request_stats(sequence: Sequence) -> RequestStats:
    """What the sequence has taken so far. Times that have not begun are zero."""
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
    )


def ended_stats(sequence: Sequence) -> EngineStats:
    """What an ended sequence adds to its engine's sums."""
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
    )
