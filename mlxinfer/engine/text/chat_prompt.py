"""A rendered conversation, with the format and the tools of its answer."""

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
    from ...vision.inputs import PromptImages

_TAIL = 32
"""Tokens at the end of the prompt that are searched for the start of the answer."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Created by `LLM.chat_prompt`; accepted wherever token ids are."""

    token_ids: list[int]
    """Tokens of the rendered conversation."""
    format: OutputFormat
    """The model's format of reasoning and calls."""
    tools: Tools = field(default_factory=dict)
    """Callable tools; empty if none may be called."""
    choice: ToolChoice = field(default_factory=lambda: ToolChoice("none"))
    """Mode: the model may, must or must not call."""
    begun: str = ""
    """Last characters of the prompt, special tokens included, which may have opened the reasoning already."""
    spelled: frozenset[int] = frozenset()
    """Special tokens in the format's marks."""
    settled: int = 0
    """Tokens of the prompt that also start the next prompt of the conversation; 0 if unknown."""
    images: PromptImages | None = None
    """The images, with their rows among the tokens; None for text."""

    @property
    def has_parts(self) -> bool:
        """True if the answer may have parts other than content."""
        return bool(self.tools or self.format.reasoning or self.format.hidden)

    def reader(self) -> OutputReader:
        """Return a reader for the parts of one answer."""
        from ...output_format.reader import OutputReader

        return OutputReader(self.format, self.tools, self.begun, parallel=self.choice.parallel)


def continued(prompt: ChatPrompt, tokenizer: Tokenizer, content: str, reasoning: str = "") -> ChatPrompt:
    """The prompt that continues an answer with this content and reasoning. Without content, the reasoning continues."""
    form, text, begun = prompt.format.reasoning, content, ""
    if form is not None:
        opened = prompt.begun.rstrip().endswith(form.begin.strip())
        if reasoning:
            text = ("" if opened else form.begin) + reasoning + (form.end + content if content else "")
        elif opened:
            text = form.end + content
        begun = form.begin if reasoning and not content else ""
    ids = tokenizer.encode(text, add_special_tokens=False)
    images = prompt.images and prompt.images.followed_by(ids)
    return replace(prompt, token_ids=[*prompt.token_ids, *ids], begun=begun, images=images)


def end_of(ids: list[int], tokenizer: Tokenizer, output_format: OutputFormat) -> str:
    """The start of the answer: text from the last control token of the prompt on, at most 32 tokens."""
    marks = spelled_tokens(tokenizer, output_format)
    tail = ids[-_TAIL:]
    first = max((i for i, token in enumerate(tail) if tokenizer.is_special(token) and token not in marks), default=0)
    return tokenizer.decode(tail[first:], skip_special_tokens=False)


def settled_tokens(ids: list[int], tokenizer: Tokenizer, variables: Mapping[str, Any]) -> int:
    """Tokens of a prompt that also start the next prompt of the conversation, at most all but one. Excluded are tokens that open the
    reasoning, which templates omit from earlier turns, and tokens that may merge with the answer's first characters."""
    try:
        end = _unsettled_end(tokenizer, tuple(sorted(variables.items())))
    except (MLXInferError, TypeError):  # a template for other conversations, or a list as a variable
        return 0
    settled = len(ids) - len(end) if tuple(ids[len(ids) - len(end) :]) == end else len(ids)
    settled = min(settled, len(ids) - 1)
    first = max(settled - _TAIL, 0)
    return max((i + 1 for i, token in enumerate(ids[first:settled], first) if tokenizer.is_special(token)), default=settled)


@lru_cache(maxsize=8)
def _unsettled_end(tokenizer: Tokenizer, variables: tuple[tuple[str, Any], ...]) -> tuple[int, ...]:
    """Tokens at the end of a prompt that change once the answer is part of the conversation."""
    asked = [{"role": "user", "content": "A"}]
    later = [*asked, {"role": "assistant", "content": "B"}, {"role": "user", "content": "C"}]
    before, after = (tokenizer.render_chat(messages, **dict(variables)) for messages in (asked, later))
    same = next((i for i, (one, other) in enumerate(zip(before, after, strict=False)) if one != other), min(len(before), len(after)))
    return tuple(tokenizer.encode(before[same:], add_special_tokens=False)) if before[same:] else ()


@lru_cache(maxsize=8)
def spelled_tokens(tokenizer: Tokenizer, output_format: OutputFormat) -> frozenset[int]:
    """Special tokens in a format's marks."""
    ids = (token for mark in output_format.literals() if mark for token in tokenizer.encode(mark, add_special_tokens=False))
    return frozenset(filter(tokenizer.is_special, ids))
