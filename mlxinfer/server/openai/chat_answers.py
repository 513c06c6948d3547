"""Answers of chat completions, complete or as events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import NotRequired, TypedDict

from ...types import Chunk, Completion, Usage
from .. import sse
from ..model_manager.registry import ServedModel
from ..settings import ReasoningField
from ..shared.images import WithTimings, timings_of
from .protocol import FINGERPRINT, ChoiceLogprobs, UsageDict, token_logprobs, usage_of
from .tools import CallFields, delta_calls, finish_reason, whole_calls

_FIELDS: dict[ReasoningField, tuple[str, ...]] = {
    "both": ("reasoning", "reasoning_content"),
    "reasoning": ("reasoning",),
    "reasoning_content": ("reasoning_content",),
    "none": (),
}


class AnswerMessage(CallFields):
    """`content` is null if there are only calls. `reasoning` and `reasoning_content` have the same text: the reasoning of the model."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]


class ChatChoice(TypedDict):
    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: str
    stop_reason: NotRequired[str]
    """vLLM's field: "loop" if `stop_on_loop` ended the answer."""


class ChatCompletion(WithTimings):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageDict


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form of the answers to one request."""

    served: ServedModel
    reasoning_field: ReasoningField = "both"
    older_form: bool = False
    """True if calls are `function_call` instead of `tool_calls`."""

    def reasoning(self, text: str | None) -> dict[str, str]:
        """The fields with the model's reasoning."""
        return dict.fromkeys(_FIELDS[self.reasoning_field], text) if text else {}

    def whole(self, answers: Sequence[Completion]) -> ChatCompletion:
        """The complete response."""
        return ChatCompletion(
            id=_new_chat_id(),
            object="chat.completion",
            created=int(time.time()),
            model=self.served.name,
            system_fingerprint=FINGERPRINT,
            choices=[self._choice(answer) for answer in answers],
            usage=usage_of([[answer.usage for answer in answers]]),
            **timings_of(answer.usage for answer in answers),
        )

    def _choice(self, answer: Completion) -> ChatChoice:
        calls = whole_calls(answer.tool_calls, self.older_form)
        content = None if calls and not answer.text else answer.text
        message: Any = {"role": "assistant", "content": content, "refusal": None, **self.reasoning(answer.reasoning), **calls}
        choice = ChatChoice(
            index=answer.index,
            message=message,
            logprobs=None if answer.logprobs is None else token_logprobs(self.served.llm.tokenizer, answer.logprobs),
            finish_reason=finish_reason(answer.finish_reason, bool(calls), self.older_form),
        )
        if answer.finish_reason == "loop":
            choice["stop_reason"] = "loop"
        return choice


def _new_chat_id() -> str:
    return f"chatcmpl-{uuid.uuid4().hex}"


class ChatEvents:
    """Events of a stream. Each of the `n` answers starts with an event with the role, and ends with an event with the finish reason."""

    def __init__(self, form: AnswerForm, wants_usage: bool) -> None:
        self._form = form
        self._tokenizer = form.served.llm.tokenizer
        self._wants_usage = wants_usage
        head = {"id": _new_chat_id(), "object": "chat.completion.chunk", "created": int(time.time()), "model": form.served.name}
        self._head = {**head, "system_fingerprint": FINGERPRINT}
        self._template = sse.Template(self._head, "choices", {"usage": None} if wants_usage else {})
        self._begun: set[int] = set()
        self._called: set[int] = set()
        self._usages: list[Usage] = []

    def render(self, chunks: list[Chunk]) -> bytes:
        """Events of these chunks."""
        return b"".join([self._chunk(chunk) for chunk in chunks])

    def end(self) -> bytes:
        """Events after all answers."""
        last = {**self._head, "choices": [], "usage": usage_of([self._usages]), **timings_of(self._usages)}
        return (sse.data(last) if self._wants_usage else b"") + sse.DONE

    def _chunk(self, chunk: Chunk) -> bytes:
        out = b""
        if chunk.index not in self._begun:
            self._begun.add(chunk.index)
            out = self._choice(chunk.index, {"role": "assistant", "content": "", "refusal": None})
        delta = self._delta(chunk)
        if delta or chunk.logprobs:
            logprobs = token_logprobs(self._tokenizer, chunk.logprobs) if chunk.logprobs else None
            out += self._choice(chunk.index, delta or {"content": ""}, logprobs)
        if chunk.finish_reason:
            reason = finish_reason(chunk.finish_reason, chunk.index in self._called, self._form.older_form)
            more = {"stop_reason": "loop"} if chunk.finish_reason == "loop" else {}
            out += self._choice(chunk.index, {}, None, reason, **more)
            self._usages += [chunk.usage] if chunk.usage else []
        return out

    def _delta(self, chunk: Chunk) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": chunk.text} if chunk.text else {}
        if chunk.reasoning:
            delta |= self._form.reasoning(chunk.reasoning)
        if chunk.tool_calls:
            self._called.add(chunk.index)
            delta |= delta_calls(chunk.tool_calls, self._form.older_form)
        return delta

    def _choice(
        self, index: int, delta: dict[str, Any], logprobs: ChoiceLogprobs | None = None, reason: str | None = None, **more: str
    ) -> bytes:
        return self._template.data([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason, **more}])
