"""Answers as JSON objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ...types import Completion


def as_object(completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the first answer with its usage; several answers are under `choices`."""
    first = _choice(completions[0])
    usage = asdict(completions[0].usage)
    if len(completions) > 1:
        return {**first, **usage, "choices": [{"index": c.index, **_choice(c), **asdict(c.usage)} for c in completions]}
    return {**first, **usage}


def _choice(completion: Completion) -> dict[str, Any]:
    choice: dict[str, Any] = {"text": completion.text, "finish_reason": completion.finish_reason}
    if completion.reasoning is not None:
        choice["reasoning"] = completion.reasoning
    if completion.logprobs is not None:
        choice["logprobs"] = [asdict(logprob) for logprob in completion.logprobs]
    return choice
