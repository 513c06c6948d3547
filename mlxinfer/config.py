"""Settings of the engine, frozen, with their defaults in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import SamplingError
from .types import SamplingParams

MAX_DRAFT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """`max_num_batched_tokens`: rows of one step, the length of a prefill chunk. `max_sequences`: running at once.
    `max_context`: tokens of one sequence, prompt and answer. `kv_cache_tokens`: tokens of all running sequences together, and of what is
    kept for reuse, of which there may be `prefix_cache_tokens`. `snapshot_bytes`: open pages and recurrent states kept for reuse.
    `max_waiting`: requests that wait; more are refused. `decode_share`: the part of their speed that running answers keep while prompts are
    read, and `max_step_s` the longest a step may take then. `max_draft`: tokens drafted per sequence and step, 0 is none; `ngrams`: from
    the text itself too, not by a draft model alone.
    `deterministic`: every row is computed in the same shapes, whatever runs beside it."""

    max_context: int
    kv_cache_tokens: int
    max_num_batched_tokens: int = 512
    max_sequences: int = 16
    max_waiting: int = 1024
    prefix_cache: bool = True
    prefix_cache_tokens: int = 2**20
    snapshot_bytes: int = 256 * 2**20
    decode_share: float = 0.8
    max_step_s: float = 0.1
    max_draft: int = MAX_DRAFT
    ngrams: bool = True
    deterministic: bool = False


_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def default_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """From `generation_config.json`: its values where it samples, greedy where it does not or says nothing."""
    values = {k: generation_config[k] for k in _RECOMMENDED if generation_config.get(k) is not None}
    if not generation_config.get("do_sample", "temperature" in values):
        return SamplingParams(temperature=0.0)
    try:
        return SamplingParams(**values)
    except SamplingError:
        return SamplingParams(temperature=0.0)
