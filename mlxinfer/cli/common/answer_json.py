"""Answers as JSON objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ...types import Completion, EngineStats


def as_object(completions: Sequence[Completion], totals: EngineStats | None = None) -> dict[str, Any]:
    """Return the first answer with its usage; several answers are under `choices`.

    `totals` are those of a model's engine. `experts` has its reads of experts from the disk, if not all experts are in memory.
    """
    first = _choice(completions[0])
    usage = asdict(completions[0].usage)
    if totals is not None and totals.experts:
        usage["experts"] = _experts(totals)
    if len(completions) > 1:
        return {**first, **usage, "choices": [{"index": c.index, **_choice(c), **asdict(c.usage)} for c in completions]}
    return {**first, **usage}


def _experts(totals: EngineStats) -> dict[str, Any]:
    tokens = max(totals.computed_tokens, 1)
    return {
        "experts": totals.experts,
        "slots": totals.expert_slots,
        "hits": totals.expert_hits,
        "misses": totals.expert_misses,
        "bytes_read": totals.expert_bytes_read,
        "bytes_read_per_token": totals.expert_bytes_read / tokens,
        "waiting_s": totals.expert_wait_s,
        "waiting_s_per_token": totals.expert_wait_s / tokens,
    }


def _choice(completion: Completion) -> dict[str, Any]:
    choice: dict[str, Any] = {"text": completion.text, "finish_reason": completion.finish_reason}
    if completion.reasoning is not None:
        choice["reasoning"] = completion.reasoning
    if completion.logprobs is not None:
        choice["logprobs"] = [asdict(logprob) for logprob in completion.logprobs]
    return choice
