"""The spellings of reasoning."""

from __future__ import annotations

from .format import ReasoningFormat

_SPELLINGS = (
    ("<|channel|>analysis<|message|>", "<|end|>"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("[THINK]", "[/THINK]"),
    ("<think>", "</think>"),
)


def reasoning_of_template(source: str) -> ReasoningFormat | None:
    """What reasoning stands between in the answers of a model with this chat template, by what the template mentions."""
    for begin, end in _SPELLINGS:
        if begin in source or end in source:
            return ReasoningFormat(begin, end)
    return None
