"""Divides an answer in a chat into reasoning, content and calls while it is generated."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...types import ToolCall, ToolCallDelta
from ...util.dataclass import dataclass
from .stopping import StopStrings

if TYPE_CHECKING:
    from ...output_format.format import OutputEvent
    from ...output_format.reader import OutputReader


@dataclass(slots=True)
class ChatDelta:
    """New text of an answer, by delta."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


class AnswerParts:
    """Divides one answer into reasoning, content and calls. Stop strings end it in its content only."""

    def __init__(self, reader: OutputReader, stops: StopStrings, seed: str) -> None:
        """`seed` determines the ids of the calls; it must differ between the turns of a conversation."""
        self._reader = reader
        self._stops = stops
        self._seed = seed
        self._reasoning: list[str] = []
        self._calls: list[tuple[ToolCallDelta, list[str]]] = []

    @property
    def reasoning(self) -> str | None:
        """All reasoning so far; None without any."""
        return "".join(self._reasoning) or None

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """All calls so far."""
        return tuple(ToolCall(first.id or "", first.name or "", "".join(pieces)) for first, pieces in self._calls)

    def add(self, text: str) -> ChatDelta:
        """Add text of the answer, special tokens included."""
        return self._delta_of(self._reader.add(text)) if text else ChatDelta()

    def finish(self, text: str = "") -> ChatDelta:
        """Add the last text and release held-back text."""
        delta = self._delta_of([*self._reader.add(text), *self._reader.finish()])
        delta.content += self._stops.finish()
        return delta

    def _delta_of(self, events: Iterable[OutputEvent]) -> ChatDelta:
        delta, calls = ChatDelta(), []
        for kind, text in events:
            if self._stops.met is not None:
                break
            if kind == "content":
                delta.content += self._stops.add(text)[0]
            elif kind == "reasoning":
                delta.reasoning += text
                self._reasoning.append(text)
            elif kind == "call_begin":
                calls.append(self._begin_call(text))
            elif kind == "arguments":
                self._calls[-1][1].append(text)
                calls.append(ToolCallDelta(len(self._calls) - 1, text))
        delta.calls = tuple(calls)
        return delta

    def _begin_call(self, name: str) -> ToolCallDelta:
        index = len(self._calls)
        digest = hashlib.blake2b(f"{self._seed} {index}".encode(), digest_size=12)
        first = ToolCallDelta(index, id=f"call_{digest.hexdigest()}", name=name)
        self._calls.append((first, []))
        return first
