"""Settings of the engine, frozen, with their defaults in one place."""

from __future__ import annotations

from dataclasses import dataclass

MAX_DRAFT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """`max_step_tokens`: rows of one step, the length of a prefill chunk. `max_sequences`: running at once.
    `max_context`: tokens of one sequence, prompt and answer. `capacity_tokens`: tokens of all running sequences together, and of what is
    kept for reuse, of which there may be `reuse_tokens`. `snapshot_bytes`: open pages and recurrent states kept for reuse.
    `max_waiting`: requests that wait; more are refused. `decode_share`: the part of their speed that running answers keep while prompts are
    read, and `max_step_s` the longest a step may take then. `max_draft`: tokens drafted per sequence and step, 0 is none; `ngrams`: from
    the text itself too, not by a draft model alone.
    `deterministic`: every row is computed in the same shapes, whatever runs beside it."""

    max_context: int
    capacity_tokens: int
    max_step_tokens: int = 512
    max_sequences: int = 16
    max_waiting: int = 1024
    prefix_cache: bool = True
    reuse_tokens: int = 2**20
    snapshot_bytes: int = 256 * 2**20
    decode_share: float = 0.8
    max_step_s: float = 0.1
    max_draft: int = MAX_DRAFT
    ngrams: bool = True
    deterministic: bool = False
