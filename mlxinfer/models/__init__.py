"""Model graphs: table from `model_type` to the family that reads the config and builds the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import mlx.core as mx

from ..errors import DraftError, UnsupportedModelError
from ..nn.weights import Weights
from .config_reader import ignored_note
from .decoder import Architecture, BlockStack, Decoder, Model, keep_lazy
from .heads.mtp import HeadPlan
from .pipeline_stage import Stage
from .vlm_text import TEXT_MODELS, bare_weights, text_config, text_weights

__all__ = ["FAMILIES", "Model", "build", "supports"]

FAMILIES = {
    "llama": "llama",
    "mistral": "llama",
    "granite": "llama",
    "smollm3": "llama",
    "qwen2": "qwen",
    "qwen3": "qwen",
    "qwen3_moe": "qwen",
    "gemma2": "gemma",
    "gemma3_text": "gemma",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "mixtral": "mixtral",
    "gpt_oss": "gpt_oss",
    "qwen3_next": "hybrid.qwen_hybrid",
    "qwen3_5_text": "hybrid.qwen_hybrid",
    "qwen3_5_moe_text": "hybrid.qwen_hybrid",
    "ministral3": "ministral3",
    "olmo3": "olmo2",
    "glm4": "glm4",
    "glm4_moe": "glm4",
    "cohere2": "cohere2",
    "exaone4": "exaone4",
    "hunyuan_v1_dense": "hunyuan",
    "seed_oss": "seed_oss",
    "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5",
    "minimax_m2": "minimax",
    "gemma4_text": "gemma4",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "glm4_moe_lite": "deepseek",
    "mistral4": "deepseek",
    "minicpm3": "deepseek",
    "kimi_linear": "hybrid.kimi_linear",
    "falcon_h1": "hybrid.falcon_h1",
    "nemotron_h": "hybrid.nemotron_h",
    "granitemoehybrid": "hybrid.granite_hybrid",
    "lfm2": "hybrid.lfm2",
    "lfm2_moe": "hybrid.lfm2",
}
"""`model_type` to the module under `families` with a function of that name."""


def supports(model_type: str) -> bool:
    """Return True if this architecture has a native graph; others may run on mlx-lm's (`fallback`)."""
    return model_type in FAMILIES or model_type in TEXT_MODELS


def build(
    config: dict[str, Any],
    weights: Weights,
    ready: Callable[[object], None] = keep_lazy,
    *,
    mtp: bool | Mapping[str, Any] | None = False,
    part: Stage | None = None,
) -> Decoder:
    """Build the model of a config and request its tensors from `weights`.

    `ready` is called with each finished part of the model, for a loader to evaluate (see `Decoder`). `mtp` selects the draft head: True for
    the checkpoint's (None: if present), or the config of another one, whose tensors `weights` also has. `part` limits the model to these
    blocks. Raises `UnsupportedModelError` before any tensor is requested, and `DraftError` without such a head.
    """
    plan, renamed = _planned(config, weights, part)
    model_type: str = config["model_type"]
    return Decoder(model_type, replace(plan, mtp=_head(plan, renamed, weights, mtp, model_type)), renamed, ready, part)


def build_blocks(config: dict[str, Any], weights: Weights, part: Stage, ready: Callable[[object], None], dtype: mx.Dtype) -> BlockStack:
    """Build the blocks of `part` alone, for rows of `dtype`. Raises `UnsupportedModelError`."""
    plan, renamed = _planned(config, weights, part)
    return BlockStack(plan, renamed, dtype, ready, part)


def _planned(config: dict[str, Any], weights: Weights, part: Stage | None) -> tuple[Architecture, Weights]:
    """Return the architecture, and the weights under the family's names; for a shard of the blocks, its part of each tensor."""
    if part is not None and part.shares > 1:
        from .tensor_parallel import Shard, ShardWeights, shared_config

        share = Shard(part.share, part.shares)
        config, weights = shared_config(config, share), ShardWeights(weights, share)
    plan = architecture(config)
    plan = replace(plan, notes=(*plan.notes, *ignored_note(config)))
    return plan, graph_weights(config, weights)


def graph_weights(config: Mapping[str, Any], weights: Weights) -> Weights:
    """Return the weights under the names that the graph of a config uses."""
    return text_weights(weights) if config["model_type"] in TEXT_MODELS else bare_weights(weights)


def _head(plan: Architecture, renamed: Weights, weights: Weights, mtp: bool | Mapping[str, Any] | None, model_type: str) -> HeadPlan | None:
    if mtp is False:
        return None
    if isinstance(mtp, Mapping):
        from .heads.kinds import head_plan

        other = head_plan(mtp, model_type, plan)
        return replace(other, load=lambda _, places: other.load(weights, places))
    if plan.mtp is None or not renamed.has(f"{plan.mtp.witness}.weight"):
        if mtp is None:
            return None
        raise DraftError("the checkpoint has no head that predicts several tokens: name a draft model or a head instead of mtp")
    return plan.mtp


def architecture(config: dict[str, Any]) -> Architecture:
    """Read the text model's architecture from a config. Raises `UnsupportedModelError`."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not supports(model_type):
        raise UnsupportedModelError(f"architecture {model_type!r} is not supported (known: {', '.join(FAMILIES)})")
    config = text_config(config) if model_type in TEXT_MODELS else config
    name = config["model_type"]
    family = import_module(f".families.{FAMILIES[name]}", __package__)
    read: Callable[[dict[str, Any]], Architecture] = getattr(family, name)
    return read(config)
