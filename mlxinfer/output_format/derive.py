"""Finds out how a model writes reasoning and calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from ..errors import MLXInferError
from ..tokenizer.tokenizer import Tokenizer
from .format import HERMES, OutputFormat
from .from_template import calls_of_template, knows
from .reasoning import reasoning_of_template

_known: WeakKeyDictionary[Tokenizer, dict[str | None, OutputFormat]] = WeakKeyDictionary()
_lock = Lock()


def may_think(tokenizer: Tokenizer) -> bool:
    """Whether the chat template mentions reasoning, so that a chat without tools needs a reader as well. Renders nothing."""
    return reasoning_of_template(tokenizer.chat_template or "") is not None


def output_format(tokenizer: Tokenizer, chosen: str | None = None, response_template: Mapping[str, Any] | None = None) -> OutputFormat:
    """How this model writes its answers: as `chosen` (a name of `FORMATS`) says, as the checkpoint's `response_template` does, as its chat
    template renders calls, as a table of families has it, or else the described form. Found out once for a tokenizer; renders the chat
    template some ten times."""
    with _lock:
        known = _known.setdefault(tokenizer, {})
        if chosen not in known:
            known[chosen] = _found(tokenizer, chosen, response_template)
        return known[chosen]


def _found(tokenizer: Tokenizer, chosen: str | None, response_template: Mapping[str, Any] | None) -> OutputFormat:
    source = tokenizer.chat_template or ""
    described = OutputFormat(reasoning_of_template(source), HERMES, "described", **knows(tokenizer))
    try:
        calls = calls_of_template(tokenizer)
    except MLXInferError:
        calls = None
    return replace(described, calls=calls, source="chat template") if calls is not None else described
