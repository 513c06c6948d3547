"""Converts configs of transformers 5 to the previous style, which mlx-lm reads.

The new keys remain beside the old ones, because some of mlx-lm's models read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from ..common import FULL, SLIDING

_NAMES = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}
"""Text models to mlx-lm's name, that of the multimodal model."""

_PATTERN_KEYS = {
    **dict.fromkeys(("gemma3_text", "cohere2", "plamo3"), "sliding_window_pattern"),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), "full_attention_interval"),
}
_COPIES = {
    "gpt2": {"n_ctx": "n_positions"},
    "internlm3": {"bias": "mlp_bias", "qkv_bias": "attention_bias"},
    "gpt_neox": {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
    "lfm2": {"block_dim": "hidden_size"},
}
"""Obsolete keys to their replacements, by `model_type`."""

_CONSTANTS: dict[str, dict[str, Any]] = {
    "apertus": {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    "glm_moe_dsa": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
    "longcat_flash": {"attention_method": "MLA", "zero_expert_type": "identity", "mla_scale_q_lora": True, "mla_scale_kv_lora": True},
    "solar_open": {"partial_rotary_factor": 1.0, "first_k_dense_replace": 0},
}
"""Obsolete keys with the only published value, by `model_type`."""

_READ_THE_NEW_STYLE = frozenset({"laguna"})
"""Models whose `rope_parameters` per kind of layer mlx-lm reads."""

_SPECIAL_FLOATS = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}

_HEAD_DIM_NEEDED = frozenset({"qwen3_moe", "exaone4"})
_ONE_THETA = frozenset({"olmo3"})
"""Models whose old style has one `rope_theta` for scaled and other layers."""
_NOT_SCALING = frozenset({"rope_theta", "partial_rotary_factor", "rope_type", "type"})


def to_old_style(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with missing old keys added: `rope_theta`, `rope_scaling`, `rope_local_base_freq`, `partial_rotary_factor`,
    `torch_dtype`, `num_experts`, and the intervals behind `layer_types`."""
    old = _translated(config)
    old["model_type"] = _NAMES.get(config.get("model_type", ""), config.get("model_type"))
    return old


def lost_in_old_style(config: Mapping[str, Any]) -> list[str]:
    """Return the settings that the old style cannot express, without which the logits differ."""
    lost = []
    known = config.get("model_type") in _READ_THE_NEW_STYLE
    for key, value in _object({} if known else config.get("rope_parameters")).items():
        if isinstance(value, dict) and key != FULL and set(value) - {"rope_theta", "rope_type"}:
            lost.append(f"rope_parameters of {key}")
        elif isinstance(value, dict) and key != FULL and value.get("rope_type", "default") != "default":
            lost.append(f"rope type {value['rope_type']} of {key}")
        elif key == SLIDING and config.get("model_type") in _ONE_THETA and _object(value).get("rope_theta") != _full_theta(config):
            lost.append(f"rope_theta of {key}")
    types, interval_key = _layer_types(config), _interval_key(config)
    if types and interval_key and interval_key not in config and _interval(types) is None:
        lost.append("layer_types, which are not periodic")
    inner = config.get("text_config")
    return lost + (lost_in_old_style(inner) if isinstance(inner, dict) else [])


def _full_theta(config: Mapping[str, Any]) -> Any:
    return _object(_object(config.get("rope_parameters")).get(FULL)).get("rope_theta")


def _translated(config: Mapping[str, Any]) -> dict[str, Any]:
    old = deepcopy(dict(config))
    if isinstance(old.get("text_config"), dict):
        old["text_config"] = _translated(old["text_config"])
        if "tie_word_embeddings" in old:
            old["text_config"]["tie_word_embeddings"] = old["tie_word_embeddings"]
    if "dtype" in old:
        old.setdefault("torch_dtype", old["dtype"])
    if "num_local_experts" in old:
        old.setdefault("num_experts", old["num_local_experts"])
    key, types = _interval_key(old), _layer_types(old)
    if key and types and _interval(types) is not None:
        old.setdefault(key, _interval(types))
    _spread_rope(old, _object(old.get("rope_parameters")))
    _add_obsolete_keys(old)
    return old


def _add_obsolete_keys(old: dict[str, Any]) -> None:
    model_type = old.get("model_type", "")
    if model_type in _HEAD_DIM_NEEDED and not old.get("head_dim") and old.get("hidden_size") and old.get("num_attention_heads"):
        old["head_dim"] = old["hidden_size"] // old["num_attention_heads"]
    for key, same in _COPIES.get(model_type, {}).items():
        if same in old:
            old.setdefault(key, old[same])
    for key, value in _CONSTANTS.get(model_type, {}).items():
        old.setdefault(key, value)
    if model_type == "gpt_bigcode" and old.get("n_embd") and not old.get("n_inner"):
        old["n_inner"] = 4 * old["n_embd"]
    if model_type == "exaone_moe" and isinstance(old.get("mlp_layer_types"), list):
        old.setdefault("is_moe_layer", [kind == "sparse" for kind in old["mlp_layer_types"]])
    if isinstance(old.get("time_step_limit"), list):
        old["time_step_limit"] = [_number(limit) for limit in old["time_step_limit"]]


def _number(value: Any) -> Any:
    """Return a number for a JSON form of infinity."""
    return _SPECIAL_FLOATS.get(str(value.get("__float__")), value) if isinstance(value, dict) else value


def _spread_rope(old: dict[str, Any], parameters: Mapping[str, Any]) -> None:
    if isinstance(parameters.get(SLIDING), dict) and "rope_theta" in parameters[SLIDING] and old.get("model_type") not in _ONE_THETA:
        old["rope_local_base_freq"] = parameters[SLIDING]["rope_theta"]
    flat = parameters[FULL] if isinstance(parameters.get(FULL), dict) else parameters
    for key in ("rope_theta", "partial_rotary_factor"):
        if flat.get(key) is not None:
            old[key] = flat[key]
    kind = flat.get("rope_type", flat.get("type", "default"))
    scaling = {key: value for key, value in flat.items() if key not in _NOT_SCALING and not isinstance(value, dict)}
    if kind == "default":
        scaling.pop("original_max_position_embeddings", None)
    scales_unless_told = old.get("model_type") == "gpt_oss"
    if (kind != "default" or scaling or scales_unless_told) and parameters and not old.get("rope_scaling"):
        old["rope_scaling"] = scaling | {"rope_type": kind, "type": kind}
    if parameters:
        old.setdefault("rope_scaling", None)
    if kind == "longrope" and "original_max_position_embeddings" in scaling:
        old.setdefault("original_max_position_embeddings", scaling["original_max_position_embeddings"])


def _interval_key(config: Mapping[str, Any]) -> str | None:
    return _PATTERN_KEYS.get(config.get("model_type", ""))


def _layer_types(config: Mapping[str, Any]) -> list[Any]:
    types = config.get("layer_types")
    return types if isinstance(types, list) else []


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _interval(types: Sequence[str]) -> int | None:
    """Return n if exactly each n-th layer has full attention; otherwise None."""
    for interval in range(1, len(types) + 2):
        if all((kind == FULL) == ((layer + 1) % interval == 0) for layer, kind in enumerate(types)):
            return interval
    return None
