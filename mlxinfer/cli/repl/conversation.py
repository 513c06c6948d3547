"""A conversation with a model: what was said, how it is sampled, how much of the context it takes. No terminal in here."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from ...config import chat_params, flags_of, settings
from ...errors import ContextLengthError, MLXInferError, PromptError, SamplingError
from ...tools import Tools
from ...types import Chunk, FinishReason, SamplingParams, ToolCall, Usage
from ..common.console import did_you_mean
from ..common.waiting import reading
from .said import Said
from .saved import Saved

if TYPE_CHECKING:
    from ...engine.llm import LLM
    from ...engine.text.chat_prompt import ChatPrompt

FIXED = {"n", "logprobs", "adapter", "structure"}
"""Sampling fields that have no meaning in a chat, or are chosen at its start."""

SETTABLE = tuple(field.name for field in fields(SamplingParams) if field.name not in FIXED)
"""Sampling fields that /set changes."""


def check_template(llm: LLM) -> None:
    """Raise `PromptError` for a model that cannot chat."""
    if llm.tokenizer.chat_template is None:
        raise PromptError(f"{llm.name} has no chat template, so it cannot chat: mlxinfer run continues a text with it")


class Conversation:
    """`ask` streams the next answer. Whatever ends it, the text so far stays; a message without an answer becomes the `draft` again."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None, source: str = "", tools: Tools | None = None) -> None:
        check_template(llm)
        self._llm = llm
        self._source = source
        self._tools = tools or {}
        self._cut: ChatPrompt | None = None
        """Prompt and answer of the last turn, where more of the answer could follow."""
        self.calls: tuple[ToolCall, ...] = ()
        """The calls that the last answer asks for: `give` brings their results."""
        self.params = params
        self.system = system
        self.turns: list[dict[str, Any]] = []
        self.usage: Usage | None = None
        self.finish_reason: FinishReason | None = None
        self.context_used = 0
        self.draft = ""
        """A message that has no answer, for the user to edit and send again."""
        self._retries = 0
        """Number of times that the last message was answered again."""

    @property
    def name(self) -> str:
        return self._llm.name

    @property
    def context_size(self) -> int:
        return self._llm.max_context

    @property
    def weight_bytes(self) -> int:
        return self._llm.weight_bytes

    @property
    def last_message(self) -> str | None:
        """The user's last message; None where there is none."""
        return next((turn["content"] for turn in reversed(self.turns) if turn["role"] == "user"), None)

    @property
    def effective_params(self) -> SamplingParams:
        """`params`; where a field was left out what the model's authors recommend, or what suits a conversation."""
        return self.params.resolved(chat_params(self._llm.default_params))

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [*_system(self.system), *self.turns]

    def ask(self, text: str) -> Generator[Chunk, None, None]:
        """Chunks of the answer. Raises `PromptError` when the conversation no longer fits in the context."""
        self.draft = text  # before anything is read: it must not be lost if that is stopped at once
        self._retries = 0
        return self._reply(text)

    def _reply(self, text: str) -> Generator[Chunk, None, None]:
        yield from self._answer(self._prompt([{"role": "user", "content": text}]), text)

    def retry(self) -> Generator[Chunk, None, None]:
        """Another answer to the last message, in place of the one that it has; if it is stopped before its first token, that one stays.
        A seed that was set is another one for each retry. Raises `PromptError` where there is none."""
        if self.last_message is None:
            raise PromptError("Nothing to retry: no message has been sent yet.")
        before, used = list(self.turns), self.context_used
        text = self.undo()
        self._retries += 1
        try:
            yield from self._reply(text)
        finally:
            if self.draft:
                self.turns, self.context_used, self.draft = before, used, ""

    def give(self, results: Sequence[str]) -> Generator[Chunk, None, None]:
        """The results of `calls`, in order, and the answer to them."""
        pairs = zip(self.calls, results, strict=True)
        turns = [{"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result} for call, result in pairs]
        self.calls = ()
        self.turns += turns
        yield from self._answer(self._prompt([]), "")

    def _prompt(self, further: list[dict[str, Any]]) -> ChatPrompt:
        """Raises `PromptError` if it does not fit in the context."""
        messages = [*self.messages, *further]
        try:
            return self._llm.chat_prompt(messages, tools=list(self._tools.values()))
        except PromptError:
            self._check_size(len(self._llm.tokenizer.encode_chat(messages)))
            raise

    def resume(self) -> Generator[Chunk, None, None]:
        """More of the last answer, which was stopped or reached `max_tokens`. Raises `PromptError` if it ended by itself."""
        if not self._cut:
            raise PromptError(
                "Nothing to continue: the last answer is complete." if self.turns else "Nothing to continue: there is no answer yet."
            )
        yield from self._answer(self._cut, None)

    def _check_size(self, tokens: int) -> None:
        if tokens >= self.context_size:
            raise ContextLengthError(
                f"the conversation would take {tokens} tokens of a context of {self.context_size}: /trim drops its oldest messages, "
                "/undo the last one, /reset begins anew",
                tokens,
                self.context_size,
            )

    def _answer(self, prompt: ChatPrompt, text: str | None) -> Generator[Chunk, None, None]:
        """`text` is the user's message, empty where there is none; None goes on with the last answer."""
        ids = prompt.token_ids
        self._check_size(len(ids))
        self.usage, self.finish_reason, self.calls = None, "cancelled", ()
        params, said = self.effective_params, Said()
        if self._retries and params.seed is not None:
            params = replace(params, seed=params.seed + self._retries)
        try:
            with closing(self._llm.stream(prompt, params, adapter=next(iter(self._llm.adapters), None))) as chunks:
                for chunk in chunks:
                    said.add(chunk)
                    self.usage, self.finish_reason = chunk.usage, chunk.finish_reason or "cancelled"
                    yield chunk
        finally:
            if said.token_ids:
                ended = self.finish_reason == "stop"
                self.calls = said.calls if ended else ()
                self._append(text, said.turn(ended=ended))
                self.context_used = len(ids) + len(said.token_ids)
                self._cut = None if ended else said.goes_on(prompt, self._llm.tokenizer.decode(said.token_ids, skip_special_tokens=False))

    def _append(self, question: str | None, turn: dict[str, Any]) -> None:
        if question is None:
            before = self.turns.pop()
            joined: dict[str, Any] = {name: before[name] + turn.get(name, "") for name in ("content", "reasoning") if name in before}
            turn = {**before, **turn, **joined}
        elif question:
            self.turns.append({"role": "user", "content": question})
            self.draft = ""
        self.turns.append(turn)

    def reading(self) -> tuple[int, int] | None:
        """(tokens read, tokens in all) of the prompt that the engine is reading; None when it is not reading one."""
        return reading(self._llm)

    def why_stopped(self) -> str:
        """Which limit ended the last answer, and what to do; empty where none did."""
        if self.finish_reason != "length":
            return ""
        if self.context_used >= self.context_size:
            return "stopped for length: the context is full (/trim drops the oldest messages)"
        return f"stopped for length: max_tokens is {self.params.max_tokens} (/continue resumes)"

    def reset(self) -> None:
        self.turns, self._cut, self.usage, self.finish_reason, self.context_used = [], None, None, None, 0
        self.calls = ()

    def undo(self) -> str:
        """Take the last message and its answer back; the message becomes the `draft`. Raises `PromptError` where there is none."""
        last = max((i for i, turn in enumerate(self.turns) if turn["role"] == "user"), default=None)
        if last is None:
            raise PromptError("Nothing to undo: no message has been sent yet.")
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

    def make_room(self, text: str) -> int:
        """Drop the oldest messages with their answers until `text` has room in three quarters of the context. Returns how many; 0, and
        nothing is dropped, where it never has."""
        starts = [i for i, turn in enumerate(self.turns) if turn["role"] == "user"]
        limit, message = self.context_size * 3 // 4, [{"role": "user", "content": text}]
        for count in range(1, len(starts) + 1):
            kept = self.turns[starts[count] :] if count < len(starts) else []
            if self._count([*kept, *message]) <= limit:
                self._replace_turns(kept)
                return count
        return 0

    def use(self, switch: Callable[[str], LLM], name: str) -> None:
        """Go on with another model. Raises `MLXInferError`, and then goes on with this one."""
        before, source = self._llm, self._source or self._llm.name
        try:
            self._llm = switch(name)
            check_template(self._llm)
            used = self._count(self.turns)
        except MLXInferError:
            if before.ended:
                self._llm = switch(source)
            raise
        self._source, self.context_used, self._cut, self.calls = name, used, None, ()

    def count_text(self, text: str) -> int:
        """Tokens of a text by itself."""
        return len(self._llm.tokenizer.encode(text))

    def token_counts(self) -> list[tuple[str, int]]:
        """What takes how many tokens of the context, roughly: the parts by themselves, without the template's words between them."""
        found = [("system message", self.count_text(self.system))] if self.system else []
        for turn in self.turns:
            found.append((f"{turn['role']}: {' '.join(turn['content'].split())[:40]}", self.count_text(turn["content"])))
        return found

    def _replace_turns(self, turns: list[dict[str, Any]]) -> None:
        self.reset()
        self.turns, self.context_used = turns, self._count(turns)

    def _count(self, turns: list[dict[str, Any]]) -> int:
        """Tokens that these turns take after the system message."""
        if not turns:
            return 0
        from ...output_format import messages_for_template

        tokenizer, messages = self._llm.tokenizer, [*_system(self.system), *turns]
        if any(turn.keys() > {"role", "content"} for turn in turns):
            messages, _ = messages_for_template(self._llm.output_format, messages, {})
        return len(tokenizer.encode_chat(messages, add_generation_prompt=False))

    def set(self, name: str, value: Any) -> None:
        """Change one field of the sampling parameters. Raises `SamplingError`."""
        name = self.setting(name, value)
        if name == "logit_bias" and isinstance(value, dict):
            value = {int(key) if str(key).isdecimal() else key: bias for key, bias in value.items()}
        self.params = replace(self.params, **{name: value})

    def setting(self, name: str, value: object = None) -> str:
        """The field that a user means, and wants to have this `value`. Raises `SamplingError` that lists what there is."""
        field = name.lower().replace("-", "_")
        chosen = {"adapter": "--adapter", **{one.name: flags_of(one, how)[0] for one, how in settings()}}
        if field in chosen and field not in SETTABLE:
            raise SamplingError(f"{field} is chosen at the start: {chosen[field]}{'' if value is None else f' {value}'}")
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


def _system(text: str | None) -> list[dict[str, Any]]:
    return [{"role": "system", "content": text}] if text else []
