"""Text models inside multimodal checkpoints: a nested config, and prefixed tensor names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from ..errors import UnsupportedModelError
from ..nn.weights import Matrix, Recipe, Weights
from ..util.dataclass import dataclass
from .config_reader import IGNORED_KEYS, ConfigReader

TEXT_MODELS: dict[str, tuple[str, ...]] = {
    "gemma3": ("gemma3_text",),
    "gemma4": ("gemma4_text",),
    "gemma4_unified": ("gemma4_unified_text",),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
    "qwen2_vl": ("qwen2_vl_text",),
    "qwen2_5_vl": ("qwen2_5_vl_text",),
    "qwen3_vl": ("qwen3_vl_text",),
    "qwen3_vl_moe": ("qwen3_vl_moe_text",),
    "mistral3": ("mistral", "ministral3", "mistral4"),
    "exaone4_5": ("exaone4", "exaone4_5_text"),
    "lfm2_vl": ("lfm2", "lfm2_moe"),
    "smolvlm": ("llama", "mistral"),
    "idefics3": ("llama", "mistral"),
    "internvl": ("qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "gpt_oss"),
    "internvl_chat": ("qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "gpt_oss"),
}
"""`model_type` of the whole model to the possible types of its text model; the first is the default."""

_QWEN2_VL = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
}
_GRAPHS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4_unified_text": (
        "gemma4_text",
        {
            "hidden_size_per_layer_input": 0,
            "max_position_embeddings": 262144,
            "sliding_window": 1024,
            "attention_k_eq_v": False,
            "use_bidirectional_attention": "vision",
            "_all_see_spans": True,
        },
    ),
    "qwen2_vl_text": ("qwen2", _QWEN2_VL),
    "qwen2_5_vl_text": ("qwen2", _QWEN2_VL),
    "qwen3_vl_text": ("qwen3", {"rope_theta": 5000000.0, "max_position_embeddings": 128000}),
    "qwen3_vl_moe_text": ("qwen3_moe", {"rope_theta": 5000000.0, "max_position_embeddings": 128000, "norm_topk_prob": True}),
    "exaone4_5_text": ("exaone4", {}),
}
"""Text models on another family's graph: (family, defaults that differ from the family's)."""
_SECTIONS = {
    "qwen2_vl_text": [16, 24, 24],
    "qwen2_5_vl_text": [16, 24, 24],
    "qwen3_vl_text": [24, 20, 20],
    "qwen3_vl_moe_text": [24, 20, 20],
}
"""`mrope_section` of text models whose config lacks the key."""

TEXT_ONLY = "_text_only"
"""Key of a text config whose file also has vision or audio towers."""

_TEXT_KEYS = {"internvl_chat": "llm_config"}
"""`model_type` to the key of the text config, if not `text_config`."""
_OUTER_KEYS = """
do_image_splitting downsample_factor downsample_ratio encoder_patch_size pad2square scale_factor select_layer template text_config
tie_word_embeddings tile_size use_backbone_lora use_llm_lora
"""
_REPEATED_KEYS = """
attention_bias head_dim hidden_act hidden_size intermediate_size max_position_embeddings num_attention_heads num_hidden_layers
num_key_value_heads rms_norm_eps rope_parameters rope_scaling rope_theta sliding_window use_sliding_window vocab_size
"""
"""Keys of text models that some configs repeat at the top level, where transformers ignores them."""
_PREFIXES = (
    ("model.language_model.", ""),
    ("language_model.model.", "language_model."),
    ("model.text_model.", ""),
    ("language_model.", "language_model."),
)
"""Prefixes of a checkpoint for `model.` of the graph, and for its other names, such as `lm_head`.

In order: Hugging Face's; its older names, and those of mlx-lm and mlx-vlm; idefics3 and smolvlm on the hub, and in mlx-vlm."""


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text config, or the config itself if flat (mlx-lm allows this). Raises `UnsupportedModelError`."""
    whole = config["model_type"]
    usual, *others = TEXT_MODELS[whole]
    place = _TEXT_KEYS.get(whole, "text_config")
    inner = config.get(place)
    if inner is None:
        return _as_graph(dict(config) | {"model_type": usual})
    if not isinstance(inner, dict) or inner.get("model_type", usual) not in (usual, *others, whole):
        raise UnsupportedModelError(f"config.json: {place} of {whole} must describe a {' or '.join(TEXT_MODELS[whole])}")
    reader = ConfigReader(config)
    reader.skip(place, *_OUTER_KEYS.split(), *_REPEATED_KEYS.split(), *(inner.keys() - {IGNORED_KEYS}))
    reader.finish()
    passed = {IGNORED_KEYS: config[IGNORED_KEYS]} if IGNORED_KEYS in config else {}
    return _as_graph(inner | passed | {"model_type": inner["model_type"] if inner.get("model_type") in others else usual})


def _as_graph(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config under the name of the family whose graph it uses."""
    name, defaults = _GRAPHS.get(config["model_type"], (config["model_type"], {}))
    sections = _SECTIONS.get(config["model_type"])
    ropes = {} if sections is None else _with_sections(config, sections)
    return {**defaults, **config, **ropes, "model_type": name}


def _with_sections(config: Mapping[str, Any], sections: list[int]) -> dict[str, Any]:
    """Return the rope parameters of a config with `mrope_section`, under the key that the config uses."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(key) or {}
    return {key: {"mrope_section": sections, **given} if isinstance(given, dict) else given}


def is_more_than_text(config: Mapping[str, Any]) -> bool:
    """True if the config describes a text model with towers, although the files may lack these."""
    whole = config.get("model_type") in TEXT_MODELS and bool(config.get("text_config") or config.get("llm_config"))
    return whole or bool(config.get(TEXT_ONLY)) or isinstance(config.get("vision_config"), Mapping)


def integer_setting(config: Mapping[str, Any], key: str) -> int | None:
    """Return an integer of the config or its `text_config`; None if missing in both."""
    inner = config.get("text_config")
    for place in (config, inner if isinstance(inner, Mapping) else {}):
        value = place.get(key)
        if isinstance(value, int):
            return value
    return None


def text_weights(weights: Weights) -> Weights:
    """Return the weights under the names of the text model's graph."""
    for body, others in _PREFIXES:
        if weights.has(f"{body}embed_tokens.weight"):
            return _Renamed(weights, body, others)
    return weights


def bare_weights(weights: Weights) -> Weights:
    """Return the weights of a checkpoint saved without its head, such as an embedding model, without the prefix `model.`."""
    return _Renamed(weights, "", "") if weights.has("embed_tokens.weight") else weights


def stored_name(weights: Weights, name: str) -> str:
    """Return the stored name that a graph's request for `name` resolves to."""
    return weights._name(name) if isinstance(weights, _Renamed) else name


def graph_name(stored: str) -> str:
    """Return the graph's name of a tensor that a checkpoint stores with the prefixes of a text model inside a larger one."""
    for body, others in _PREFIXES:
        rest = stored.removeprefix(body)
        if rest != stored and (body != others or rest.partition(".")[0] in ("embed_tokens", "layers", "norm")):
            return f"model.{rest}"
    return stored.removeprefix("language_model.")


@dataclass(frozen=True, slots=True)
class _Renamed:
    """Weights with replaced prefixes of names."""

    weights: Weights
    body: str
    """Replaces `model.`."""
    others: str
    """Precedes names without `model.`."""

    def has(self, name: str) -> bool:
        return self.weights.has(self._name(name))

    def matrix(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), quantizable: bool = True) -> Matrix:
        return self.weights.matrix(self._name(name), shape, otherwise=self._recipes(otherwise), quantizable=quantizable)

    def vector(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), dtype: mx.Dtype | None = None) -> mx.array:
        return self.weights.vector(self._name(name), shape, otherwise=self._recipes(otherwise), dtype=dtype)

    def _name(self, name: str) -> str:
        return self.body + name.removeprefix("model.") if name.startswith("model.") else self.others + name

    def _recipes(self, recipes: Sequence[Recipe]) -> list[Recipe]:
        return [replace(recipe, sources=tuple(map(self._name, recipe.sources))) for recipe in recipes]
