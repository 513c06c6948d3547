"""Settings of the engine, frozen, with their defaults in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """`max_step_tokens`: rows of one step, the length of a prefill chunk. `max_sequences`: running at once.
    `max_context`: tokens of one sequence, prompt and answer. `capacity_tokens`: tokens of all running sequences together."""

    max_context: int
    capacity_tokens: int
    max_step_tokens: int = 512
    max_sequences: int = 16
