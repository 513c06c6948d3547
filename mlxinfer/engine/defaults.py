"""Sampling settings that a model's authors recommend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import SamplingError
from ..types import SamplingParams

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
