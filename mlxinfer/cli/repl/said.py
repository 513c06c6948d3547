"""What a model has said so far in one answer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...types import Chunk, ToolCall

if TYPE_CHECKING:
    from ...engine.text.chat_prompt import ChatPrompt


@dataclass(slots=True)
class Said:
    """Collects the chunks of an answer."""

    token_ids: list[int] = field(default_factory=list)
    """Ids of its tokens."""
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _calls: list[tuple[str, str, list[str]]] = field(default_factory=list)

    def add(self, chunk: Chunk) -> None:
        """Take the next piece."""
        self.token_ids += chunk.token_ids
        self._content.append(chunk.text)
        if chunk.reasoning:
            self._reasoning.append(chunk.reasoning)
        for delta in chunk.tool_calls:
            if delta.name is not None:
                self._calls.append((delta.id or "", delta.name, []))
            self._calls[delta.index][2].append(delta.arguments)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls in it."""
        return tuple(ToolCall(call_id, name, "".join(pieces)) for call_id, name, pieces in self._calls)

    def turn(self, *, ended: bool) -> dict[str, Any]:
        """The answer as a message. A call in an answer that was stopped is no call."""
        turn: dict[str, Any] = {"role": "assistant", "content": "".join(self._content)}
        if self._reasoning:
            turn["reasoning"] = "".join(self._reasoning)
        if ended and self._calls:
            functions = [(call.id, {"name": call.name, "arguments": call.arguments}) for call in self.calls]
            turn["tool_calls"] = [{"id": call_id, "type": "function", "function": function} for call_id, function in functions]
        return turn

    def goes_on(self, prompt: ChatPrompt, text: str) -> ChatPrompt:
        """The prompt of the rest of the answer; `text` is what there is of it, special tokens included."""
        form, begun = prompt.format.reasoning, ""
        if form is not None and form.end.strip() not in text:
            thinks = bool(self._reasoning) or prompt.begun.rstrip().endswith(form.begin.strip())
            begun = form.begin if thinks else ""
        return replace(prompt, token_ids=[*prompt.token_ids, *self.token_ids], begun=begun)
