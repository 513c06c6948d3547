"""Text models inside checkpoints that also see images: their config is a part of the config, their tensors have longer names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from ..errors import UnsupportedModelError
from ..nn.weights import Matrix, Recipe, Weights
from ..records import dataclass
from .config_reader import ConfigReader

TEXT_MODELS = {
    "gemma3": ("gemma3_text",),
    "gemma4": ("gemma4_text",),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
    "mistral3": ("mistral", "ministral3", "mistral4"),
}
"""`model_type` of the whole to those that its text model may have; the first, if the config does not say."""

NOTE = "only the text model is used: images are not understood"

_OUTER_KEYS = """
audio_config boi_token_index eoa_token_index eoi_token_index image_token_id image_token_index language_model_only mm_tokens_per_image
multimodal_projector_bias projector_hidden_act spatial_merge_size text_config tie_word_embeddings video_token_id vision_config
vision_end_token_id vision_feature_layer vision_start_token_id
"""
_PREFIXES = (("model.", "model.language_model."), ("", "language_model."))
"""What a name in the graph starts with, and what it starts with in a checkpoint: Hugging Face's and mlx-lm's."""


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's part, or the config itself where it is flat (as mlx-lm allows). Raises `UnsupportedModelError`."""
    whole = config["model_type"]
    usual, *others = TEXT_MODELS[whole]
    inner = config.get("text_config")
    if inner is None:
        return dict(config) | {"model_type": usual}
    if not isinstance(inner, dict) or inner.get("model_type", usual) not in (usual, *others, whole):
        raise UnsupportedModelError(f"config.json: text_config of {whole} must describe a {' or '.join(TEXT_MODELS[whole])}")
    reader = ConfigReader(config)
    reader.skip(*_OUTER_KEYS.split())
    reader.finish()
    return inner | {"model_type": inner["model_type"] if inner.get("model_type") in others else usual}


def integer_setting(config: Mapping[str, Any], key: str) -> int | None:
    """An integer of the config, or of its `text_config`; None where neither has one."""
    inner = config.get("text_config")
    for place in (config, inner if isinstance(inner, Mapping) else {}):
        value = place.get(key)
        if isinstance(value, int):
            return value
    return None


def text_weights(weights: Weights) -> Weights:
    """Those weights under the names that the text model's graph uses."""
    for short, long in _PREFIXES:
        name = "model.embed_tokens.weight"
        if weights.has(long + name.removeprefix(short)):
            return _Renamed(weights, short, long)
    return weights


def bare_weights(weights: Weights) -> Weights:
    """Those of a checkpoint that was saved without its head, as embedding models are: no name begins with `model.`."""
    return _Renamed(weights, "model.", "") if weights.has("embed_tokens.weight") else weights


@dataclass(frozen=True, slots=True)
class _Renamed:
    """Weights with another start to every name that has the short one."""

    weights: Weights
    short: str
    long: str

    def has(self, name: str) -> bool:
        return self.weights.has(self._name(name))

    def matrix(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), quantizable: bool = True) -> Matrix:
        return self.weights.matrix(self._name(name), shape, otherwise=self._recipes(otherwise), quantizable=quantizable)

    def vector(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), dtype: mx.Dtype | None = None) -> mx.array:
        return self.weights.vector(self._name(name), shape, otherwise=self._recipes(otherwise), dtype=dtype)

    def _name(self, name: str) -> str:
        return self.long + name.removeprefix(self.short) if name.startswith(self.short) else name

    def _recipes(self, recipes: Sequence[Recipe]) -> list[Recipe]:
        return [replace(recipe, sources=tuple(map(self._name, recipe.sources))) for recipe in recipes]
