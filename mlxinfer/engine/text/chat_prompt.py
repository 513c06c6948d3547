"""A conversation that is ready to be answered: its tokens, and what reads and holds the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ...errors import MLXInferError
from ...tokenizer.tokenizer import Tokenizer
from ...tools import ToolChoice, Tools
from ...util.dataclass import dataclass

if TYPE_CHECKING:
    from ...output_format.format import OutputFormat
    from ...output_format.reader import OutputReader

_TAIL = 32
"""Tokens at the prompt's end in which the answer's beginning is looked for."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Made by `LLM.chat_prompt`; taken wherever token ids are."""

    token_ids: list[int]
    """The rendered conversation."""
    format: OutputFormat
    """How the model writes reasoning and calls."""
    tools: Tools = field(default_factory=dict)
    """What may be called; empty where nothing may."""
    choice: ToolChoice = field(default_factory=lambda: ToolChoice("none"))
    """Whether the model may, must or must not call."""
    begun: str = ""
    """The prompt's last characters, special tokens included: they may have opened the reasoning already."""
    spelled: frozenset[int] = frozenset()
    """Special tokens that the format's marks are made of."""
    settled: int = 0
    """Tokens of the prompt that stay as they are once an answer and another message follow; 0 where that is not known."""

    @property
    def has_parts(self) -> bool:
        """Whether there is anything to tell apart in the answer."""
        return bool(self.tools or self.format.reasoning or self.format.hidden)

    def reader(self) -> OutputReader:
        """Return a reader of one answer's parts."""
        from ...output_format.reader import OutputReader

        return OutputReader(self.format, self.tools, self.begun, parallel=self.choice.parallel)


def continued(prompt: ChatPrompt, tokenizer: Tokenizer, content: str, reasoning: str = "") -> ChatPrompt:
    """The prompt of the rest of an answer that has this much already. Its reasoning goes on where there is no content yet."""
    form, text, begun = prompt.format.reasoning, content, ""
    if form is not None:
        opened = prompt.begun.rstrip().endswith(form.begin.strip())
        if reasoning:
            text = ("" if opened else form.begin) + reasoning + (form.end + content if content else "")
        elif opened:
            text = form.end + content
        begun = form.begin if reasoning and not content else ""
    return replace(prompt, token_ids=[*prompt.token_ids, *tokenizer.encode(text, add_special_tokens=False)], begun=begun)


def end_of(ids: list[int], tokenizer: Tokenizer, output_format: OutputFormat) -> str:
    """What follows the last control token of a prompt, that one included, at most 32 tokens: the beginning of the answer."""
    marks = spelled_tokens(tokenizer, output_format)
    tail = ids[-_TAIL:]
    first = max((i for i, token in enumerate(tail) if tokenizer.is_special(token) and token not in marks), default=0)
    return tokenizer.decode(tail[first:], skip_special_tokens=False)


def settled_tokens(ids: list[int], tokenizer: Tokenizer, variables: Mapping[str, Any]) -> int:
    """How many tokens of a prompt the next prompt of the conversation begins with: not those that open the reasoning, which templates leave
    out of earlier turns, nor those that the answer's first characters may be joined with. At least one token is left."""
    try:
        end = _unsettled_end(tokenizer, tuple(sorted(variables.items())))
    except (MLXInferError, TypeError):  # a template for other conversations, or a variable that is a list
        return 0
    settled = len(ids) - len(end) if tuple(ids[len(ids) - len(end) :]) == end else len(ids)
    settled = min(settled, len(ids) - 1)
    first = max(settled - _TAIL, 0)
    return max((i + 1 for i, token in enumerate(ids[first:settled], first) if tokenizer.is_special(token)), default=settled)


@lru_cache(maxsize=8)
def _unsettled_end(tokenizer: Tokenizer, variables: tuple[tuple[str, Any], ...]) -> tuple[int, ...]:
    """The tokens at the end of a prompt that are others as soon as the answer is part of the conversation."""
    asked = [{"role": "user", "content": "A"}]
    later = [*asked, {"role": "assistant", "content": "B"}, {"role": "user", "content": "C"}]
    before, after = (tokenizer.render_chat(messages, **dict(variables)) for messages in (asked, later))
    same = next((i for i, (one, other) in enumerate(zip(before, after, strict=False)) if one != other), min(len(before), len(after)))
    return tuple(tokenizer.encode(before[same:], add_special_tokens=False)) if before[same:] else ()


@lru_cache(maxsize=8)
def spelled_tokens(tokenizer: Tokenizer, output_format: OutputFormat) -> frozenset[int]:
    """The special tokens that occur in a format's marks."""
    ids = (token for mark in output_format.literals() if mark for token in tokenizer.encode(mark, add_special_tokens=False))
    return frozenset(filter(tokenizer.is_special, ids))
