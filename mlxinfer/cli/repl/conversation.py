"""A conversation with a model: what was said, how it is sampled, how much of the context it takes. No terminal in here."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator
from contextlib import closing
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from ...errors import PromptError, SamplingError
from ...types import Chunk, FinishReason, SamplingParams, Usage
from ..console import did_you_mean
from .saved import Saved

if TYPE_CHECKING:
    from ...engine.llm import LLM

FIXED = {"n", "logprobs"}
"""Sampling fields that have no meaning in a chat."""

SETTABLE = tuple(field.name for field in fields(SamplingParams) if field.name not in FIXED)
"""Sampling fields that /set changes."""


class Conversation:
    """`ask` streams the next answer. Whatever ends it, the text so far stays; a message without an answer becomes the `draft` again."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None, source: str = "") -> None:
        if llm.tokenizer.chat_template is None:
            raise PromptError(f"{llm.name} has no chat template, so it cannot chat: mlxinfer run continues a text with it")
        self._llm = llm
        self._source = source
        self._cut: list[int] = []
        """Prompt and answer of the last turn as token ids, where more of the answer could follow."""
        self.params = params
        self.system = system
        self.turns: list[dict[str, str]] = []
        self.usage: Usage | None = None
        self.finish_reason: FinishReason | None = None
        self.context_used = 0
        self.draft = ""
        """A message that has no answer, for the user to edit and send again."""

    @property
    def name(self) -> str:
        return self._llm.name

    @property
    def context_size(self) -> int:
        return self._llm.max_context

    @property
    def effective_params(self) -> SamplingParams:
        """`params`, and the model's own where a field was left out."""
        return self.params.resolved(self._llm.default_params)

    @property
    def messages(self) -> list[dict[str, str]]:
        return [*_system(self.system), *self.turns]

    def ask(self, text: str) -> Generator[Chunk, None, None]:
        """Chunks of the answer. Raises `PromptError` when the conversation no longer fits in the context."""
        self.draft = text
        ids = self._llm.tokenizer.encode_chat([*self.messages, {"role": "user", "content": text}])
        yield from self._answer(ids, text)

    def resume(self) -> Generator[Chunk, None, None]:
        """More of the last answer, which was stopped or reached `max_tokens`. Raises `PromptError` if it ended by itself."""
        if not self._cut:
            raise PromptError("there is nothing to continue: the last answer ended by itself")
        yield from self._answer(self._cut, None)

    def _answer(self, ids: list[int], text: str | None) -> Generator[Chunk, None, None]:
        if len(ids) >= self.context_size:
            raise PromptError(
                f"the conversation would take {len(ids)} tokens of a context of {self.context_size}: /trim drops its oldest messages, "
                "/undo the last one, /reset begins anew"
            )
        self.usage, self.finish_reason = None, "cancelled"
        pieces: list[str] = []
        answer: list[int] = []
        try:
            with closing(self._llm.stream(ids, self.params)) as chunks:
                for chunk in chunks:
                    pieces.append(chunk.text)
                    answer += chunk.token_ids
                    self.usage, self.finish_reason = chunk.usage, chunk.finish_reason or "cancelled"
                    yield chunk
        finally:
            if answer:
                self._append(text, "".join(pieces))
                self.context_used = len(ids) + len(answer)
                self._cut = [] if self.finish_reason == "stop" else [*ids, *answer]

    def _append(self, question: str | None, answer: str) -> None:
        if question is None:
            answer = self.turns.pop()["content"] + answer
        else:
            self.turns.append({"role": "user", "content": question})
            self.draft = ""
        self.turns.append({"role": "assistant", "content": answer})

    def reading(self) -> tuple[int, int] | None:
        """(tokens read, tokens in all) of the prompt that the engine is reading; None when it is not reading one."""
        for sequence in self._llm.engine.scheduler.running:
            if sequence.num_computed_tokens < len(sequence.prompt):
                return sequence.num_computed_tokens, len(sequence.prompt)
        return None

    def why_stopped(self) -> str:
        """Which limit ended the last answer, and what to do; empty where none did."""
        if self.finish_reason != "length":
            return ""
        if self.context_used >= self.context_size:
            return "stopped for length: the context is full (/trim drops the oldest messages)"
        return f"stopped for length: max_tokens is {self.params.max_tokens} (/continue goes on)"

    def reset(self) -> None:
        self.turns, self._cut, self.usage, self.finish_reason, self.context_used = [], [], None, None, 0

    def undo(self) -> str:
        """Take the last message and its answer back; the message becomes the `draft`. Raises `PromptError` where there is none."""
        last = max((i for i, turn in enumerate(self.turns) if turn["role"] == "user"), default=None)
        if last is None:
            raise PromptError("there is nothing to take back")
        self.draft = self.turns[last]["content"]
        self._replace_turns(self.turns[:last])
        return self.draft

    def trim(self, count: int | None = None) -> int:
        """Drop the `count` oldest messages with their answers, or as many as leave half of the context free. Returns how many."""
        starts = [i for i, turn in enumerate(self.turns) if turn["role"] == "user"]
        if count is None:
            half = self.context_size // 2
            count = bisect_left(range(len(starts)), True, key=lambda n: self._count(self.turns[starts[n] :]) <= half)
        count = min(count, len(starts))
        self._replace_turns(self.turns[starts[count] :] if count < len(starts) else [])
        return count

    def _replace_turns(self, turns: list[dict[str, str]]) -> None:
        self.reset()
        self.turns, self.context_used = turns, self._count(turns)

    def _count(self, turns: list[dict[str, str]]) -> int:
        """Tokens that these turns take after the system message."""
        return len(self._llm.tokenizer.encode_chat([*_system(self.system), *turns], add_generation_prompt=False)) if turns else 0

    def set(self, name: str, value: Any) -> None:
        """Change one field of the sampling parameters. Raises `SamplingError`."""
        name = self.setting(name)
        if name == "logit_bias" and isinstance(value, dict):
            value = {int(key) if str(key).isdecimal() else key: bias for key, bias in value.items()}
        self.params = replace(self.params, **{name: value})

    def setting(self, name: str) -> str:
        """The field that a user means. Raises `SamplingError` that lists what there is."""
        field = name.lower().replace("-", "_")
        if field not in SETTABLE:
            raise SamplingError(f"there is no {name!r} to set{did_you_mean(field, SETTABLE)}: {', '.join(SETTABLE)}")
        return field

    def snapshot(self) -> Saved:
        """What a file keeps of this conversation."""
        return Saved(list(self.turns), self.system, self.params, self.name, self._source)

    def restore(self, saved: Saved) -> None:
        """Go on with a saved conversation. Raises `MLXInferError` where the model's template refuses it, and then changes nothing."""
        before = self.system
        self.system = saved.system
        try:
            used = self._count(saved.turns)
        except BaseException:
            self.system = before
            raise
        self.reset()
        self.turns, self.context_used, self.params = list(saved.turns), used, saved.params or self.params


def _system(text: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": text}] if text else []
