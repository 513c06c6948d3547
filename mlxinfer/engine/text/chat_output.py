"""An answer's reasoning, content and calls, collected as its text comes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...tokenizer.detokenizer import StopStrings
from ...types import ToolCall, ToolCallDelta
from ...util.dataclass import dataclass

if TYPE_CHECKING:
    from ...output_format.format import OutputEvent
    from ...output_format.reader import OutputReader


@dataclass(slots=True)
class Part:
    """What a token brought."""

    content: str = ""
    """Text for the reader."""
    reasoning: str = ""
    """Text of the reasoning."""
    calls: tuple[ToolCallDelta, ...] = ()
    """Pieces of calls."""


class AnswerParts:
    """Tells the parts of one answer apart. Stop strings end it in its content only, not in reasoning or calls."""

    def __init__(self, reader: OutputReader, stops: StopStrings, seed: str) -> None:
        """`seed`: what the calls' ids are made of; another one for every turn of a conversation."""
        self._reader = reader
        self._stops = stops
        self._seed = seed
        self._reasoning: list[str] = []
        self._calls: list[tuple[ToolCallDelta, list[str]]] = []

    @property
    def reasoning(self) -> str | None:
        """All of it so far; None without any."""
        return "".join(self._reasoning) or None

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """All of them so far."""
        return tuple(ToolCall(first.id or "", first.name or "", "".join(pieces)) for first, pieces in self._calls)

    def add(self, text: str) -> Part:
        """Take more of the answer, special tokens included."""
        return self._taken(self._reader.add(text)) if text else Part()

    def finish(self, text: str = "") -> Part:
        """Take the last of it, and what was held back."""
        part = self._taken([*self._reader.add(text), *self._reader.finish()])
        part.content += self._stops.finish()
        return part

    def _taken(self, events: Iterable[OutputEvent]) -> Part:
        part, deltas = Part(), []
        for kind, text in events:
            if self._stops.met is not None:
                break
            if kind == "content":
                part.content += self._stops.add(text)[0]
            elif kind == "reasoning":
                part.reasoning += text
                self._reasoning.append(text)
            elif kind == "call_begin":
                deltas.append(self._begun(text))
            elif kind == "arguments":
                self._calls[-1][1].append(text)
                deltas.append(ToolCallDelta(len(self._calls) - 1, text))
        part.calls = tuple(deltas)
        return part

    def _begun(self, name: str) -> ToolCallDelta:
        index = len(self._calls)
        digest = hashlib.blake2b(f"{self._seed} {index}".encode(), digest_size=12)
        first = ToolCallDelta(index, id=f"call_{digest.hexdigest()}", name=name)
        self._calls.append((first, []))
        return first
