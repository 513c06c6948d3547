"""Measured differences between the logits of mlx-lm's graphs and transformers', and the refused architectures.

The errors were measured with tiny random checkpoints of transformers 5.23 in float32, 100 tokens, whole and in chunks, with mlx-lm 0.32.2.
`tests/support/fallback/cases.py` has the settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import UnsupportedModelError
from ...util.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one architecture."""

    error: float | None = None
    """Largest difference of a logit from transformers', for logits between 1 and 9; None if not compared."""
    refused: bool = False
    """True if checkpoints of the architecture are refused."""
    reason: str = ""
    """Reason for the refusal or the missing comparison."""


_UNKNOWN = "transformers 5.23 does not have it"
_OTHER_TENSORS = "mlx-lm's graph has other tensors than the checkpoints that transformers writes"
_OTHER_CONFIG = "mlx-lm's graph reads other configs than those that transformers writes"

CHECKS: Mapping[str, Check] = {
    "afmoe": Check(4e-6),
    "apertus": Check(4e-6),
    "bailing_hybrid": Check(reason=_OTHER_CONFIG),
    "bitnet": Check(reason="transformers packs its weights when it is trained, and writes no random ones in that form"),
    "cohere": Check(8e-7),
    "dbrx": Check(6e-6),
    "deepseek_v32": Check(5e-6),
    "dots1": Check(4e-6),
    "exaone_moe": Check(6e-6),
    "falcon_mamba": Check(7e-6),
    "gemma": Check(2e-3),
    "gemma3n": Check(8e-6),
    "glm": Check(refused=True, reason="mlx-lm's graph rotates all channels of a head, where transformers rotates half of them"),
    "glm_moe_dsa": Check(6e-6),
    "gpt2": Check(3e-6),
    "gpt_bigcode": Check(2e-3),
    "gpt_neox": Check(2e-3),
    "gptj": Check(2e-6),
    "granitemoe": Check(1e-6),
    "helium": Check(5e-6),
    "internlm3": Check(4e-6),
    "iquestcoder": Check(4e-6),
    "jamba": Check(2e-5),
    "joyai_llm_flash": Check(5e-6),
    "kimi_k2": Check(5e-6),
    "kimi_k25": Check(reason="not tried: its text model is that of kimi_k2"),
    "laguna": Check(6e-6),
    "llama4": Check(7e-5),
    "llama4_text": Check(5e-6),
    "longcat_flash": Check(6e-5),
    "mamba": Check(3e-6),
    "mamba2": Check(5e-6),
    "mellum": Check(3e-6),
    "mimo_v2_flash": Check(reason=_OTHER_CONFIG),
    "minimax": Check(reason="mlx-lm's graph of that name is the one of MiniMax-M2; others are refused"),
    "minimax_m3_vl": Check(4e-6),
    "muse_glimmer": Check(6e-6),
    "muse_spark": Check(reason="mlx-lm's graph runs on Apple GPUs only"),
    "nanochat": Check(reason=_OTHER_TENSORS),
    "nemotron": Check(2e-5),
    "olmo": Check(reason="mlx-lm's graph needs the package ai2-olmo"),
    "olmo_hybrid": Check(3e-5),
    "olmoe": Check(4e-6),
    "phi": Check(2e-6),
    "phimoe": Check(5e-6),
    "qwen2_moe": Check(3e-6),
    "recurrent_gemma": Check(4e-5),
    "solar_open": Check(4e-6),
    "stablelm": Check(5e-6),
    "starcoder2": Check(9e-4),
    "step3p5": Check(reason="transformers 5.23 has it as a part of step3p7 only"),
}
"""Results by `model_type`; others were not compared, because transformers 5.23 does not have them."""


_ONLY: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_by_inverse_layer_idx": (False,),
        "scale_attn_weights": (True,),
    },
    "gpt_bigcode": {"multi_query": (True,)},
    "gpt_neox": {"hidden_act": ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")},
    "mamba2": {"n_groups": (1,)},
    "olmoe": {"clip_qkv": (None,)},
    "qwen2_moe": {"norm_topk_prob": (False,)},
    "stablelm": {"hidden_act": ("silu",)},
}
"""Settings that mlx-lm's graph ignores, by `model_type`, to the values with which its logits are right."""


_NO_SCALING = frozenset({"qwen2_moe", "solar_open"})
"""Architectures whose graphs accept a rope scaling in the config and ignore or misapply it."""


def check_of(model_type: str) -> Check:
    """Return the result of an architecture on mlx-lm's graph."""
    return CHECKS.get(model_type, Check(reason=_UNKNOWN))


def note_of(model_type: str) -> tuple[str, ...]:
    """Return a note about an architecture that was not compared; empty otherwise."""
    check = check_of(model_type)
    if check.error is not None:
        return ()
    return (f"the logits of mlx-lm's {model_type} were not compared with those of transformers: {check.reason}",)


def refuse_what_differs(config: Mapping[str, Any]) -> None:
    """Raise `UnsupportedModelError` for architectures and settings for which mlx-lm's graph gives wrong logits."""
    model_type = str(config.get("model_type"))
    check = check_of(model_type)
    reason = check.reason if check.refused else _differing_setting(model_type, config)
    if reason:
        raise UnsupportedModelError(f"{model_type} would give other logits than with transformers, and is refused: {reason}")


def _differing_setting(model_type: str, config: Mapping[str, Any]) -> str:
    """Return the setting that mlx-lm's graph gets wrong, or ""."""
    for key, right in _ONLY.get(model_type, {}).items():
        if key in config and config[key] not in right:
            return f"{key} is {config[key]}, and mlx-lm's graph computes as if it were {right[0]}"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaling = rope.get("rope_type", rope.get("type", "default"))
    if model_type in _NO_SCALING and scaling != "default":
        return f"the rope scaling is {scaling}, which mlx-lm's graph gets wrong"
    if model_type == "minimax" and not any("MiniMaxM2" in str(name) for name in config.get("architectures") or ()):
        return "mlx-lm's graph of that name is the one of MiniMax-M2, which architectures does not name"
    text = config.get("text_config") or {}
    if model_type == "minimax_m3_vl" and isinstance(text, dict) and text.get("rotary_dim") and text.get("head_dim"):
        share = (text.get("rope_parameters") or {}).get("partial_rotary_factor")
        if share is not None and int(share * text["head_dim"]) != text["rotary_dim"]:
            return f"rotary_dim is {text['rotary_dim']}, but partial_rotary_factor is {share}, which transformers reads instead"
    return ""
