"""Separately stored draft heads, dispatched by their config: this project's form, EAGLE-3, Gemma 4's assistant."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ...errors import DraftError
from ..decoder import Architecture
from .mtp import HeadPlan

_EAGLE3 = frozenset({"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator"})
_BY_TYPE = {"mtp_head": "llama", "gemma4_assistant": "gemma4_assistant"}
"""`model_type` to the module that reads the config."""


def kind_of(config: Mapping[str, Any]) -> str | None:
    """Return the module for a head's config; None for a model's config."""
    found = config.get("architectures")
    named = found if isinstance(found, list) else []
    if any(isinstance(name, str) and name in _EAGLE3 for name in named):
        return "eagle3"
    if config.get("model_type") == "llama" and "draft_vocab_size" in config:
        return "eagle3"
    return _BY_TYPE.get(str(config.get("model_type")))


def head_plan(config: Mapping[str, Any], model_type: str, target: Architecture) -> HeadPlan:
    """Read a head's config for the model `target`. Raises `DraftError` if it does not fit."""
    kind = kind_of(config)
    if kind is None:
        raise DraftError("the config does not describe a head")
    read = import_module(f".{kind}", __package__)
    if kind == "llama":
        found: HeadPlan = read.head_plan(config, target.sizes.hidden, target.sizes.vocab)
    else:
        found = read.head_plan(config, model_type, target)
    return found
