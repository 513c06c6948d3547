"""Display of earlier turns of a conversation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .pastes import folded
from .pictures import name_of
from .terminal import AnswerWriter


@dataclass(frozen=True, slots=True)
class Shown:
    """Turns that a command shows."""

    turns: list[dict[str, Any]]
    """Messages as `{"role": ..., "content": ...}`."""
    told: str = ""
    """Note about the turns."""
    asked: bool = False
    """True if the user requested the turns, so that a pipe gets them too."""

    def write(self, out: AnswerWriter) -> None:
        """Write messages after a prompt, long ones folded, and answers in their original form."""
        for turn in self.turns:
            text = turn["content"]
            if turn["role"] == "user":
                for entry in turn.get("images", ()):
                    out.aside(f"picture: {name_of(entry)}")
                out.message(folded(text))
            elif turn["role"] == "tool":
                out.aside(f"{turn.get('name') or 'tool'}: {folded(text)}")
            else:
                out.begin(str)
                out.text(text)
                out.end()
                for call in turn.get("tool_calls", ()):
                    function = call["function"]
                    out.aside(f"asked for {function.get('name', '')}({folded(str(function.get('arguments', '')))})")


def last_exchange(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the user's last message and all turns after it."""
    last = max((i for i, turn in enumerate(turns) if turn["role"] == "user"), default=0)
    return turns[last:]
