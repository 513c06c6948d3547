"""The spellings of reasoning."""

from __future__ import annotations

import re

from .format import ReasoningFormat

_SPELLINGS = (
    ("<|channel|>analysis<|message|>", "<|end|>"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    ("[THINK]", "[/THINK]"),
)
_TAG = re.compile(r"</?((?:\w+:)?think(?::\w+)?)>")


def reasoning_in(text: str) -> ReasoningFormat | None:
    """What reasoning stands between in the answers of a model, by a text that has it: its chat template, and what that renders."""
    for begin, end in _SPELLINGS:
        if begin in text and (end in text or begin.startswith("<|")):
            return ReasoningFormat(begin, end)
    tag = _TAG.search(text)
    return ReasoningFormat(f"<{tag[1]}>", f"</{tag[1]}>") if tag else None
