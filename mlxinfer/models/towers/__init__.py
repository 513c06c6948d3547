"""Vision towers: graphs that turn the pixels of images into rows of the text model's width.

`tower_of` is the entry. Each family is a module with a function `load(config, weights)`. Pixels are those of transformers' image
processors; GELU kinds, eps and orders of channels follow the transformers source that each module names.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ...errors import UnsupportedModelError
from ...nn.weights import Weights
from .tower import Encoded, Size, Stages, Tower

__all__ = ["TOWERS", "Encoded", "Size", "Stages", "Tower", "has_tower", "tower_of"]

TOWERS = {
    "smolvlm": "idefics3",
    "idefics3": "idefics3",
    "gemma3": "gemma3",
    "lfm2_vl": "lfm2_vl",
    "mistral3": "pixtral",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl",
    "qwen3_5": "qwen3_vl",
    "qwen3_5_moe": "qwen3_vl",
    "qwen2_5_vl": "qwen2_vl",
    "qwen2_vl": "qwen2_vl",
    "gemma4": "gemma4",
    "gemma4_unified": "gemma4_unified",
    "internvl": "internvl",
    "internvl_chat": "internvl",
}
"""`model_type` of a config to the module that builds its tower."""


def has_tower(config: Mapping[str, Any]) -> bool:
    """True if the config describes a tower that `tower_of` builds; a text-only conversion has no `vision_config`."""
    return config.get("model_type") in TOWERS and isinstance(config.get("vision_config"), Mapping)


def tower_of(config: Mapping[str, Any], weights: Weights) -> Tower:
    """Build the tower of a config and request its tensors from `weights`.

    Names may be those of Hugging Face (transformers 4 or 5) or of mlx-vlm. Raises `UnsupportedModelError` for an unknown family, or
    for a key of `vision_config` that may change the features, before any tensor is requested.
    """
    family = TOWERS.get(config.get("model_type") or "")
    if family is None:
        raise UnsupportedModelError(f"config.json: images of model_type {config.get('model_type')!r} are not supported")
    if not isinstance(config.get("vision_config"), Mapping):
        raise UnsupportedModelError("config.json: vision_config is missing: this checkpoint has no vision tower")
    tower: Tower = import_module(f".{family}", __package__).load(config, weights)
    return tower
