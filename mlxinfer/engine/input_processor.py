"""From what a caller hands in to the sequences that the engine runs: prompts are checked, and settings become limits."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from operator import index
from time import perf_counter
from typing import Any, SupportsIndex, Union

from ..errors import PromptError, SamplingError
from ..sampling.sampler import sample_seed
from ..tokenizer.tokenizer import Tokenizer
from ..types import SamplingParams
from .sequence import Sequence

Prompt = Union[str, Many[int]]
Messages = Many[Mapping[str, Any]]

_MOST_MARKS = 4
"""Ends of messages whose state is kept: a conversation goes on behind the last ones."""
_LONGEST_NAME = 256
_MOST_SECONDS = 10 * 365 * 86400.0
_PRIORITIES = range(-(2**31), 2**31)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """How a request is to be served beside others: who asks, how urgent it is (lower is served first), and when it has to end."""

    client_id: str = ""
    priority: int = 0
    deadline: float | None = None
    """In seconds of `perf_counter`."""

    @classmethod
    def of(cls, client_id: str, priority: int, timeout_s: float | None) -> RequestOptions:
        """Raises `SamplingError` for values that have no meaning. The time runs from now on."""
        if not isinstance(client_id, str) or len(client_id) > _LONGEST_NAME:
            raise SamplingError(f"client_id must be a text of up to {_LONGEST_NAME} characters")
        if isinstance(priority, bool) or not isinstance(priority, int) or priority not in _PRIORITIES:
            raise SamplingError(f"priority must be a whole number of 32 bits, not {priority!r}")
        if timeout_s is None:
            return cls(client_id=client_id, priority=priority)
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 < timeout_s <= _MOST_SECONDS:
            raise SamplingError(f"timeout_s must be a number of seconds above 0, not {timeout_s!r}")
        return cls(client_id=client_id, priority=priority, deadline=perf_counter() + timeout_s)


@dataclass(frozen=True, slots=True)
class InputProcessor:
    """What has to be known of a model to take requests for it. Any thread may use it."""

    tokenizer: Tokenizer
    vocab_size: int
    max_context: int
    default_params: SamplingParams

    def token_ids(self, prompt: Prompt) -> list[int]:
        """Raises `PromptError` for a prompt that is empty, too long or not of this model's tokens."""
        ids = self.check(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        if len(ids) >= self.max_context:
            raise PromptError(
                f"the prompt has {len(ids)} tokens, which leaves no room for an answer in the context of {self.max_context}: shorten it"
            )
        return ids

    def scored_ids(self, prompt: Prompt) -> list[int]:
        """`token_ids` of a prompt that no answer needs room behind."""
        return self.check(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)

    def chat_ids(self, messages: Messages, tools: Many[Mapping[str, Any]] | None, template_vars: Mapping[str, Any]) -> list[int]:
        """Raises `TemplateError` too."""
        return self.token_ids(self.tokenizer.encode_chat(messages, tools=tools, **template_vars))

    def check(self, ids: Many[int]) -> list[int]:
        ids = list(ids)
        if not ids:
            raise PromptError("the prompt is empty")
        if len(ids) > self.max_context:
            raise PromptError(f"{len(ids)} tokens do not fit in the context of {self.max_context}")
        for i, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, SupportsIndex) or not 0 <= token < self.vocab_size:
                raise PromptError(f"token id {token!r} is not one of the model's (0 to {self.vocab_size - 1})")
            ids[i] = index(token)
        return ids

    def sequences(self, ids: list[int], params: SamplingParams | None, terms: RequestOptions) -> list[Sequence]:
        """The `n` sequences of a request, of which the first leads the others. Raises `SamplingError` for a bias of no token."""
        params = params or self.default_params
        if params.logit_bias and max(params.logit_bias) >= self.vocab_size:
            raise SamplingError(f"logit_bias: {max(params.logit_bias)} is not one of the model's token ids (0 to {self.vocab_size - 1})")
        seed = int.from_bytes(os.urandom(8), "little") if params.seed is None else params.seed
        limit = min(len(ids) + (params.max_tokens or self.max_context), self.max_context)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.tokenizer.eos_token_ids)
        snapshot_points = tuple(end for end in message_ends(ids, self.tokenizer.eos_token_ids) if end < len(ids))[-_MOST_MARKS:]
        sequences = [
            Sequence(
                ids,
                params,
                sample_seed(seed, i),
                limit,
                stop_ids,
                i,
                client_id=terms.client_id,
                priority=terms.priority,
                deadline=terms.deadline,
                snapshot_points=snapshot_points,
            )
            for i in range(params.n)
        ]
        sequences[0].lead(sequences[1:])
        return sequences

    def scored(self, ids: list[int], top: int, terms: RequestOptions) -> Sequence:
        """A sequence that is read only, for the log-probabilities of its tokens and of the `top` likeliest."""
        return Sequence(
            ids,
            SamplingParams(logprobs=top),
            seed=0,
            max_length=len(ids),
            wants_logits=True,
            client_id=terms.client_id,
            priority=terms.priority,
            deadline=terms.deadline,
        )


def as_prompts(prompts: Prompt | Many[Prompt]) -> list[Prompt]:
    """One prompt or many as a list of them."""
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and isinstance(items[0], int):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def one_answer(params: SamplingParams) -> None:
    """Raise `PromptError` unless a request of these wants one answer."""
    if params.n != 1:
        raise PromptError("a stream has one answer: use n=1, or generate() for more")


def message_ends(ids: Iterable[int], end_tokens: Collection[int]) -> list[int]:
    """Lengths of the prompt at which a message ends."""
    return [i for i, token in enumerate(ids, 1) if token in end_tokens]


def with_message(miss: str, ids: Many[int], end_tokens: Collection[int]) -> str:
    """Why not more of a prompt was reused, with the number of the message in which the cached text ends, where there are messages."""
    found = re.search(r"token (\d+)", miss)
    if not found:
        return miss
    ends = message_ends(ids, end_tokens)
    return f"{miss}, message {1 + sum(end <= int(found[1]) for end in ends)}" if ends else miss
