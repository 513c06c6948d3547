"""Answers of the Responses API: a list of items, complete or as events."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any, Literal, Union

from typing_extensions import TypedDict

from ...tokenizer import Tokenizer
from ...types import Chunk, Completion, TokenLogprob, ToolCallDelta, Usage
from .. import sse
from ..errors import APIError
from ..shared.tools import as_pieces
from .protocol import ContentLogprob, content_logprobs
from .response_items import Status


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: Sequence[ContentLogprob]


class OutputMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class SummaryText(TypedDict):
    type: Literal["summary_text"]
    text: str


class OutputReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(TypedDict):
    """The reasoning of the model: `content`, or `summary` if the request asks for a summary, because clients show only summaries."""

    id: str
    type: Literal["reasoning"]
    summary: list[SummaryText]
    content: list[OutputReasoningText]
    status: Status


class OutputFunctionCall(TypedDict):
    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: Status


OutputItem = Union[OutputMessage, OutputReasoning, OutputFunctionCall]
Render = Callable[[Status, list[Any], "Usage | None"], Any]
"""Renders the object of the whole response from its status, items and usage."""


class ResponseEvents:
    """Numbered events of one response, and its items. An item starts with its first text. A response has at least one item, which may be
    an empty text."""

    def __init__(self, tokenizer: Tokenizer, response: Render, *, sums_up: bool) -> None:
        """`sums_up`: True to send the reasoning as its own summary."""
        self._tokenizer = tokenizer
        self._response = response
        self._sums_up = sums_up
        self._number = 0
        self._items: list[OutputItem] = []
        self._open: Any = None
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._pending_logprobs: list[TokenLogprob] = []
        self._last: Chunk | None = None

    def begin(self) -> bytes:
        """Events before the first item."""
        response = self._response("in_progress", [], None)
        return self._event("response.created", response=response) + self._event("response.in_progress", response=response)

    def render(self, chunks: list[Chunk]) -> bytes:
        """Events of these chunks."""
        return b"".join(map(self._chunk, chunks))

    def end(self) -> bytes:
        """Events after the last piece."""
        response, out = self._finished()
        return out + self._event(f"response.{response['status']}", response=response)

    def whole(self, answer: Completion) -> Any:
        """The complete response."""
        calls = as_pieces(answer.tool_calls)
        logprobs = answer.logprobs and answer.logprobs[answer.usage.reasoning_tokens :]
        self._chunk(Chunk(answer.text, answer.token_ids, logprobs, reasoning=answer.reasoning or "", tool_calls=calls))
        self._last = Chunk("", finish_reason=answer.finish_reason, usage=answer.usage)
        return self._finished()[0]

    def failed(self, error: APIError) -> bytes:
        """The last event of a failed stream."""
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _finished(self) -> tuple[Any, bytes]:
        reason, usage = (self._last.finish_reason, self._last.usage) if self._last else ("stop", None)
        status: Status = "incomplete" if reason in ("length", "loop") else "completed"
        in_message = self._open is not None and self._open["type"] == "message"
        out = self._text("") if (self._pending_logprobs and in_message) or not (self._items or self._open) else b""
        out += self._close(status)
        return self._response(status, self._items, usage), out

    def _chunk(self, chunk: Chunk) -> bytes:
        out = b""
        self._last = chunk
        if chunk.reasoning:
            out += self._within("reasoning") + self._reasoning(chunk.reasoning)
        self._pending_logprobs += chunk.logprobs or ()
        if chunk.text:
            out += self._text(chunk.text)
        for piece in chunk.tool_calls:
            out += self._call(piece)
        if chunk.reasoning or chunk.tool_calls:
            self._pending_logprobs.clear()  # their tokens are not text
        return out

    def _reasoning(self, text: str) -> bytes:
        self._texts.append(text)
        if self._sums_up:
            return self._of_item("response.reasoning_summary_text.delta", summary_index=0, delta=text)
        return self._of_item("response.reasoning_text.delta", content_index=0, delta=text)

    def _text(self, text: str) -> bytes:
        """Events of a piece of text, with the log-probabilities of the tokens since the previous piece."""
        out = self._within("message")
        pending, self._pending_logprobs = self._pending_logprobs, []
        self._texts.append(text)
        self._logprobs += pending
        if not text and not pending:
            return out
        logprobs = content_logprobs(self._tokenizer, pending)
        return out + self._of_item("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _call(self, piece: ToolCallDelta) -> bytes:
        out = b""
        if piece.name is not None:
            call_id, name = piece.id or "", piece.name
            item = OutputFunctionCall(
                id=_new_item_id("fc"), type="function_call", call_id=call_id, name=name, arguments="", status="in_progress"
            )
            out = self._close("completed") + self._begin(item)
        if not piece.arguments:
            return out
        self._texts.append(piece.arguments)
        return out + self._of_item("response.function_call_arguments.delta", delta=piece.arguments)

    def _within(self, kind: Literal["message", "reasoning"]) -> bytes:
        """Events that start an item of this kind, unless one is open."""
        if self._open is not None and self._open["type"] == kind:
            return b""
        out = self._close("completed")
        if kind == "message":
            out += self._begin(OutputMessage(id=_new_item_id("msg"), type="message", role="assistant", status="in_progress", content=[]))
            return out + self._of_item("response.content_part.added", content_index=0, part=self._output_text("", ()))
        out += self._begin(OutputReasoning(id=_new_item_id("rs"), type="reasoning", summary=[], content=[], status="in_progress"))
        return out + self._thought("added", "")

    def _begin(self, item: OutputItem) -> bytes:
        self._open, self._texts, self._logprobs = item, [], []
        return self._event("response.output_item.added", output_index=len(self._items), item=item)

    def _close(self, status: Status) -> bytes:
        """Events that end the open item."""
        if self._open is None:
            return b""
        text = "".join(self._texts)
        done: Any
        out, done = {"message": self._message, "reasoning": self._reasoned, "function_call": self._called}[self._open["type"]](text)
        done["status"] = status
        out += self._event("response.output_item.done", output_index=len(self._items), item=done)
        self._items.append(done)
        self._open = None
        return out

    def _message(self, text: str) -> tuple[bytes, Any]:
        part = self._output_text(text, self._logprobs)
        out = self._of_item("response.output_text.done", content_index=0, text=text, logprobs=part["logprobs"])
        return out + self._of_item("response.content_part.done", content_index=0, part=part), {**self._open, "content": [part]}

    def _reasoned(self, text: str) -> tuple[bytes, Any]:
        if self._sums_up:
            out = self._of_item("response.reasoning_summary_text.done", summary_index=0, text=text)
            return out + self._thought("done", text), {**self._open, "summary": [SummaryText(type="summary_text", text=text)]}
        out = self._of_item("response.reasoning_text.done", content_index=0, text=text)
        return out + self._thought("done", text), {**self._open, "content": [OutputReasoningText(type="reasoning_text", text=text)]}

    def _thought(self, what: Literal["added", "done"], text: str) -> bytes:
        if self._sums_up:
            summary = SummaryText(type="summary_text", text=text)
            return self._of_item(f"response.reasoning_summary_part.{what}", summary_index=0, part=summary)
        return self._of_item(f"response.content_part.{what}", content_index=0, part=OutputReasoningText(type="reasoning_text", text=text))

    def _called(self, text: str) -> tuple[bytes, Any]:
        out = self._of_item("response.function_call_arguments.done", name=self._open["name"], arguments=text)
        return out, {**self._open, "arguments": text}

    def _output_text(self, text: str, logprobs: Sequence[TokenLogprob]) -> OutputText:
        return OutputText(type="output_text", text=text, annotations=[], logprobs=content_logprobs(self._tokenizer, logprobs))

    def _of_item(self, name: str, /, **values: Any) -> bytes:
        return self._event(name, item_id=self._open["id"], output_index=len(self._items), **values)

    def _event(self, name: str, /, **values: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return sse.event(name, {"type": name, "sequence_number": number, **values})


def _new_item_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
