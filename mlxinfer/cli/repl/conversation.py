"""A conversation with a model: turns, sampling parameters and use of the context, without any terminal."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...config import chat_params, flags_of, settings
from ...errors import ContextLengthError, MLXInferError, PromptError, SamplingError
from ...tools import Tools
from ...types import Chunk, FinishReason, SamplingParams, ToolCall, Usage
from ..common.console import LOOPED, did_you_mean, experts_line
from ..common.pictures import PictureFile, picture_note
from ..common.waiting import reading
from ..remote.remote_model import RemoteModel, RemotePrompt
from .pictures import Pictures, name_of
from .saved import Saved

if TYPE_CHECKING:
    from ...engine.llm import LLM
    from ...engine.text.chat_prompt import ChatPrompt

FIXED = {"n", "logprobs", "adapter", "structure"}
"""Sampling fields that are meaningless in a chat or fixed at its start."""

SETTABLE = tuple(field.name for field in fields(SamplingParams) if field.name not in FIXED)
"""Sampling fields that /set can change."""


def check_template(llm: LLM | RemoteModel) -> None:
    """Raise `PromptError` for a model without a chat template."""
    if llm.tokenizer.chat_template is None:
        raise PromptError(f"{llm.name} has no chat template, so it cannot chat: mlxinfer run continues a text with it")


@dataclass(slots=True)
class PartialAnswer:
    """Collects the chunks of an answer."""

    token_ids: list[int] = field(default_factory=list)
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _calls: list[tuple[str, str, list[str]]] = field(default_factory=list)

    def add(self, chunk: Chunk) -> None:
        """Add the next chunk."""
        self.token_ids += chunk.token_ids
        self._content.append(chunk.text)
        if chunk.reasoning:
            self._reasoning.append(chunk.reasoning)
        for delta in chunk.tool_calls:
            if delta.name is not None:
                self._calls.append((delta.id or "", delta.name, []))
            self._calls[delta.index][2].append(delta.arguments)

    @property
    def begun(self) -> bool:
        """Return True if a token has arrived. Chunks of a server have no ids."""
        return bool(self.token_ids or self._reasoning or self._calls or any(self._content))

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Return the answer's tool calls."""
        return tuple(ToolCall(call_id, name, "".join(pieces)) for call_id, name, pieces in self._calls)

    def turn(self, *, ended: bool) -> dict[str, Any]:
        """Return the answer as a message; calls of a stopped answer are dropped."""
        turn: dict[str, Any] = {"role": "assistant", "content": "".join(self._content)}
        if self._reasoning:
            turn["reasoning"] = "".join(self._reasoning)
        if ended and self._calls:
            functions = [(call.id, {"name": call.name, "arguments": call.arguments}) for call in self.calls]
            turn["tool_calls"] = [{"id": call_id, "type": "function", "function": function} for call_id, function in functions]
        return turn

    def goes_on(self, prompt: ChatPrompt, text: str) -> ChatPrompt:
        """Return the prompt that continues the answer; `text` is its text so far, with special tokens."""
        form, begun = prompt.format.reasoning, ""
        if form is not None and form.end.strip() not in text:
            thinks = bool(self._reasoning) or prompt.begun.rstrip().endswith(form.begin.strip())
            begun = form.begin if thinks else ""
        images = prompt.images and prompt.images.followed_by(self.token_ids)
        return replace(prompt, token_ids=[*prompt.token_ids, *self.token_ids], begun=begun, images=images)


class Conversation:
    """A conversation whose `ask` streams the next answer.

    The text so far is kept whatever ends the answer. A message without any answer becomes the `draft` again.
    """

    def __init__(
        self, llm: LLM | RemoteModel, params: SamplingParams, system: str | None = None, source: str = "", tools: Tools | None = None
    ) -> None:
        check_template(llm)
        self._llm = llm
        self._source = source
        self._tools = tools or {}
        self._cut: ChatPrompt | RemotePrompt | None = None
        """Prompt with the last answer, if that answer can continue."""
        self.calls: tuple[ToolCall, ...] = ()
        """Tool calls of the last answer; `give` receives their results."""
        self.params = params
        self.system = system
        self.turns: list[dict[str, Any]] = []
        self.usage: Usage | None = None
        self.finish_reason: FinishReason | None = None
        self.context_used = 0
        self.draft = ""
        """Message without an answer, for the user to edit and send again."""
        self.pending: list[dict[str, str]] = []
        """Pictures that go with the next message."""
        self._pictures = Pictures()
        self._retries = 0
        """Number of retries of the last message."""

    @property
    def name(self) -> str:
        return self._llm.name

    @property
    def context_size(self) -> int:
        return self._llm.max_context

    @property
    def weight_bytes(self) -> int:
        return self._llm.weight_bytes

    def experts_line(self) -> str:
        """Return a line about experts read from the disk; "" if all are in memory, or if a server has the model."""
        return "" if isinstance(self._llm, RemoteModel) else experts_line(self._llm.stats())

    @property
    def last_message(self) -> str | None:
        """User's last message; None without one."""
        return next((turn["content"] for turn in reversed(self.turns) if turn["role"] == "user"), None)

    @property
    def effective_params(self) -> SamplingParams:
        """`params` with unset fields replaced by the authors' recommendation or the chat's default."""
        return self.params.resolved(chat_params(self._llm.default_params))

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [*_system(self.system), *map(self._pictures.message, self.turns)]

    def ask(self, text: str) -> Generator[Chunk, None, None]:
        """Stream the answer to a message with the `pending` pictures. Raises `PromptError` if the conversation exceeds the context."""
        self.draft = text  # first, so that an immediate stop does not lose it
        self._retries = 0
        return self._reply(text)

    def _reply(self, text: str) -> Generator[Chunk, None, None]:
        yield from self._answer(self._prompt([self._question(text)]), text)

    def _question(self, text: str) -> dict[str, Any]:
        """Return the user's next turn."""
        images = {"images": list(self.pending)} if self.pending else {}
        return {"role": "user", "content": text, **images}

    def attach(self, path: Path) -> str:
        """Add a picture to the next message, and return a line with its size and tokens. Raises `ImageError` that names the file."""
        entry = self._pictures.attach(path)
        note = picture_note(self._llm, PictureFile(path.name, self._pictures.data(entry) or b""))
        self.pending.append(entry)
        return note

    def retry(self) -> Generator[Chunk, None, None]:
        """Stream a replacement of the last answer, which stays if the replacement stops before its first token.

        Each retry uses a different seed derived from the set one. Raises `PromptError` without a message.
        """
        if self.last_message is None:
            raise PromptError("Nothing to retry: no message has been sent yet.")
        before, used, waiting = list(self.turns), self.context_used, self.pending
        self.pending = []
        text = self.undo()
        self._retries += 1
        try:
            yield from self._reply(text)
        finally:
            self.pending = waiting
            if self.draft:
                self.turns, self.context_used, self.draft = before, used, ""

    def give(self, results: Sequence[str]) -> Generator[Chunk, None, None]:
        """Add the results of `calls`, in order, and stream the next answer."""
        pairs = zip(self.calls, results, strict=True)
        turns = [{"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result} for call, result in pairs]
        self.calls = ()
        self.turns += turns
        yield from self._answer(self._prompt([]), "")

    def _prompt(self, further: list[dict[str, Any]]) -> Any:
        """Return the prompt. Raises `PromptError` if it exceeds the context."""
        messages = [*self.messages, *map(self._pictures.message, further)]
        try:
            return self._llm.chat_prompt(messages, tools=list(self._tools.values()))
        except ContextLengthError as error:
            self._check_size(error.tokens)
            raise

    def resume(self) -> Generator[Chunk, None, None]:
        """Continue an answer that was stopped or reached `max_tokens`. Raises `PromptError` if the answer was complete."""
        if not self._cut:
            raise PromptError(
                "Nothing to continue: the last answer is complete." if self.turns else "Nothing to continue: there is no answer yet."
            )
        yield from self._answer(self._cut, None)

    def _check_size(self, tokens: int) -> None:
        if tokens >= self.context_size:
            raise ContextLengthError(
                f"the conversation would take {tokens} tokens of a context of {self.context_size}: /trim drops its oldest messages, "
                "/undo the last one, /reset starts again",
                tokens,
                self.context_size,
            )

    def _answer(self, prompt: Any, text: str | None) -> Generator[Chunk, None, None]:
        """Stream an answer; `text` is the user's message, "" for tool results, None to continue the last answer."""
        ids = prompt.token_ids
        self._check_size(len(ids))
        self.usage, self.finish_reason, self.calls = None, "cancelled", ()
        params, said = self.effective_params, PartialAnswer()
        if self._retries and params.seed is not None:
            params = replace(params, seed=params.seed + self._retries)
        try:
            with closing(self._llm.stream(prompt, params, adapter=next(iter(self._llm.adapters), None))) as chunks:
                for chunk in chunks:
                    said.add(chunk)
                    self.usage, self.finish_reason = chunk.usage, chunk.finish_reason or "cancelled"
                    yield chunk
        finally:
            if said.begun:
                ended = self.finish_reason == "stop"
                self.calls = said.calls if ended else ()
                self._append(text, said.turn(ended=ended))
                self.context_used = self.usage.total_tokens if self.usage else len(ids) + len(said.token_ids)
                self._cut = None if ended else self._continuation(prompt, said)

    def _continuation(self, prompt: ChatPrompt | RemotePrompt, said: PartialAnswer) -> ChatPrompt | RemotePrompt:
        if isinstance(prompt, RemotePrompt):
            return prompt.continued(said.turn(ended=False))
        assert not isinstance(self._llm, RemoteModel)
        return said.goes_on(prompt, self._llm.tokenizer.decode(said.token_ids, skip_special_tokens=False))

    def _append(self, question: str | None, turn: dict[str, Any]) -> None:
        if question is None:
            before = self.turns.pop()
            joined: dict[str, Any] = {name: before[name] + turn.get(name, "") for name in ("content", "reasoning") if name in before}
            turn = {**before, **turn, **joined}
        elif question:
            self.turns.append(self._question(question))
            self.draft, self.pending = "", []
        self.turns.append(turn)

    def reading(self) -> tuple[int, int] | None:
        """Return (tokens read, total tokens) of the prompt during prefill; otherwise None."""
        return reading(self._llm)

    def why_stopped(self) -> str:
        """Return the limit that ended the last answer and the remedy, or ""."""
        if self.finish_reason == "loop":
            return f"stopped: {LOOPED} (/continue resumes; /set stop_on_loop false lets it run)"
        if self.finish_reason != "length":
            return ""
        if self.context_used >= self.context_size:
            return "stopped for length: the context is full (/trim drops the oldest messages)"
        return f"stopped for length: max_tokens is {self.params.max_tokens} (/continue resumes)"

    def reset(self) -> None:
        self.turns, self._cut, self.usage, self.finish_reason, self.context_used = [], None, None, None, 0
        self.calls = ()

    def undo(self) -> str:
        """Remove the last message with its answer. The message becomes the `draft`, its pictures are `pending`.

        Raises `PromptError` without a message.
        """
        last = max((i for i, turn in enumerate(self.turns) if turn["role"] == "user"), default=None)
        if last is None:
            raise PromptError("Nothing to undo: no message has been sent yet.")
        self.draft = self.turns[last]["content"]
        self.pending = [*self.turns[last].get("images", ()), *self.pending]
        self._replace_turns(self.turns[:last])
        return self.draft

    def trim(self, count: int | None = None) -> int:
        """Drop the `count` oldest messages with their answers, by default until half of the context is free. Returns the number."""
        starts = [i for i, turn in enumerate(self.turns) if turn["role"] == "user"]
        if count is None:
            half = self.context_size // 2
            count = bisect_left(range(len(starts)), True, key=lambda n: self._count(self.turns[starts[n] :]) <= half)
        count = min(count, len(starts))
        self._replace_turns(self.turns[starts[count] :] if count < len(starts) else [])
        return count

    def make_room(self, text: str) -> int:
        """Drop the oldest messages with their answers until all fits with `text` in three quarters of the context.

        Returns the number; 0 without any change if `text` alone is too long.
        """
        starts = [i for i, turn in enumerate(self.turns) if turn["role"] == "user"]
        limit, message = self.context_size * 3 // 4, [self._question(text)]
        for count in range(1, len(starts) + 1):
            kept = self.turns[starts[count] :] if count < len(starts) else []
            if self._count([*kept, *message]) <= limit:
                self._replace_turns(kept)
                return count
        return 0

    def use(self, switch: Callable[[str], LLM | RemoteModel], name: str) -> None:
        """Continue with another model. Raises `MLXInferError` and keeps the present one."""
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
        """Return the number of tokens of a text."""
        return len(self._llm.tokenizer.encode(text))

    def token_counts(self) -> list[tuple[str, int]]:
        """Return (part, approximate tokens) of the context, without the template's tokens between the parts."""
        found = [("system message", self.count_text(self.system))] if self.system else []
        for turn in self.turns:
            found += [(f"picture: {name_of(entry)}", self._image_tokens(entry)) for entry in turn.get("images", ())]
            found.append((f"{turn['role']}: {' '.join(turn['content'].split())[:40]}", self.count_text(turn["content"])))
        return found

    def _image_tokens(self, entry: dict[str, str]) -> int:
        data = self._pictures.data(entry)
        if data is None or isinstance(self._llm, RemoteModel):
            return 0
        return self._llm.image_layout(data).tokens

    def _replace_turns(self, turns: list[dict[str, Any]]) -> None:
        self.reset()
        self.turns, self.context_used = turns, self._count(turns)

    def _count(self, turns: list[dict[str, Any]]) -> int:
        """Return the tokens of these turns after the system message."""
        if not turns:
            return 0
        from ...output_format import messages_for_template

        messages = [*_system(self.system), *map(self._pictures.message, turns)]
        if isinstance(self._llm, RemoteModel) or any(turn.get("images") for turn in turns):
            return self._llm.count_tokens(messages)
        tokenizer = self._llm.tokenizer
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
        """Return the field for a user's name and `value`. Raises `SamplingError` with the list of fields."""
        field = name.lower().replace("-", "_")
        chosen = {"adapter": "--adapter", **{one.name: flags_of(one, how)[0] for one, how in settings()}}
        if field in chosen and field not in SETTABLE:
            raise SamplingError(f"{field} is chosen at the start: {chosen[field]}{'' if value is None else f' {value}'}")
        if field not in SETTABLE:
            raise SamplingError(f"Unknown setting {name!r}{did_you_mean(field, SETTABLE)}: {', '.join(SETTABLE)}")
        return field

    def snapshot(self) -> Saved:
        """Return the saved form of the conversation."""
        return Saved(list(self.turns), self.system, self.params, self.name, self._source)

    def restore(self, saved: Saved) -> list[str]:
        """Continue a saved conversation, and return a note for each picture that is gone.

        Raises `MLXInferError` without any change if the model's template refuses it.
        """
        before = self.system
        self.system = saved.system
        try:
            lost = self._pictures.read_again(saved.turns)
            used = self._count(saved.turns)
        except BaseException:
            self.system = before
            raise
        self.reset()
        self.turns, self.context_used, self.params, self.pending = list(saved.turns), used, saved.params or self.params, []
        return lost


def _system(text: str | None) -> list[dict[str, Any]]:
    return [{"role": "system", "content": text}] if text else []
