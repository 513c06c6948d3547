"""GGUF files as Ollama's converters write them: each function changes a golden file and returns Ollama's name for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.formats.gguf_golden import Arrays

Hyper = dict[str, Any]

VISION = {
    "vision.block_count": 2,
    "vision.attention.head_count": 4,
    "vision.attention.layer_norm_epsilon": 1e-6,
    "vision.image_mean": [0.5, 0.5, 0.5],
    "vision.patch_size": 14,
    "image_token_id": 7,
    "vision_start_token_id": 8,
    "vision_end_token_id": 9,
}


def with_eyes(arrays: Arrays) -> None:
    arrays["v.blk.0.attn_q.weight"] = np.ones((4, 4))
    arrays["v.patch_embd.weight"] = np.ones((2, 3, 2, 2))
    arrays["mm.input_projection.weight"] = np.ones((4, 4))


def with_drafts(arrays: Arrays) -> None:
    arrays["mtp.fc.weight"] = np.ones((4, 8))
    arrays["mtp.layers.0.attn_norm.weight"] = np.ones(4)


def renamed(arrays: Arrays, *names: tuple[str, str]) -> None:
    for tensor in list(arrays):
        for old, new in names:
            if old in tensor:
                arrays[tensor.replace(old, new)] = arrays.pop(tensor)
                break


def moved(hyper: Hyper, *names: tuple[str, str]) -> None:
    for old, new in names:
        hyper[new] = hyper.pop(old)


def dropped(hyper: Hyper, *keys: str) -> None:
    for key in keys:
        hyper.pop(key)


def gemma3(hyper: Hyper, arrays: Arrays) -> str:
    """4B, 12B and 27B, without what Ollama's graph takes for granted."""
    dropped(hyper, "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.freq_base_swa")
    hyper |= VISION | {"mm.tokens_per_image": 256}
    with_eyes(arrays)
    return "gemma3"


def gemma3_text(hyper: Hyper, arrays: Arrays) -> str:
    moved(hyper, ("rope.freq_base_swa", "rope.local.freq_base"))
    hyper["attention.sliding_window_pattern"] = [True] * 5 + [False, True]
    return "gemma3"


def gemma3_old_text(hyper: Hyper, arrays: Arrays) -> str:
    moved(hyper, ("rope.freq_base_swa", "rope.local.freq_base"), ("rope.freq_base", "rope.global.freq_base"))
    return "gemma3"


def gemma4(hyper: Hyper, arrays: Arrays) -> str:
    hyper |= VISION | {"audio.block_count": 1, "audio.conv_kernel_size": 5, "vision.projector.scale_factor": 3}
    with_eyes(arrays)
    arrays["a.blk.0.attn_q.weight"] = np.ones((4, 4))
    arrays["model.vision_tower.encoder.layers.0.self_attn.q_proj.input_max"] = np.ones(1)
    return "gemma4"


def gemma4_old_names(hyper: Hyper, arrays: Arrays) -> str:
    moved(hyper, ("rope.freq_base_swa", "rope.local.freq_base"))
    renamed(
        arrays,
        (".post_attention_norm.", ".attn_post_norm."),
        (".layer_output_scale.weight", ".layer_scalar"),
        (".post_ffw_norm_1.", ".ffn_post_norm_1."),
        (".post_ffw_norm_2.", ".ffn_post_norm_2."),
        (".pre_ffw_norm_2.", ".ffn_pre_norm_2."),
        (".post_ffw_norm.", ".ffn_post_norm."),
        (".ffn_norm.", ".ffn_pre_norm."),
        (".ffn_down_exps.scale", ".ffn_gate_inp.per_expert_scale"),
    )
    return "gemma4"


def gpt_oss(hyper: Hyper, arrays: Arrays) -> str:
    """The published form: an architecture without a hyphen, other names, and no width of the experts."""
    dropped(hyper, "expert_feed_forward_length", "rope.scaling.type", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow")
    renamed(
        arrays,
        (".attn_output.", ".attn_out."),
        (".attn_sinks.weight", ".attn_sinks"),
        (".post_attention_norm.", ".ffn_norm."),
    )
    return "gptoss"


def gpt_oss_fused(hyper: Hyper, arrays: Arrays) -> str:
    """The first form of the converter: queries, keys and values in one, and rows of gate and up in turn."""
    for layer in range(2):
        for end in ("weight", "bias"):
            parts = [arrays.pop(f"blk.{layer}.attn_{part}.{end}") for part in "qkv"]
            arrays[f"blk.{layer}.attn_qkv.{end}"] = np.concatenate(parts)
            gate, up = (arrays.pop(f"blk.{layer}.ffn_{part}_exps.{end}") for part in ("gate", "up"))
            arrays[f"blk.{layer}.ffn_gate_up_exps.{end}"] = np.stack([gate, up], axis=2).reshape(gate.shape[0], -1, *gate.shape[2:])
    return gpt_oss(hyper, arrays)


def mistral3(hyper: Hyper, arrays: Arrays) -> str:
    moved(
        hyper,
        ("rope.scaling.yarn_beta_fast", "rope.scaling.beta_fast"),
        ("rope.scaling.yarn_beta_slow", "rope.scaling.beta_slow"),
        ("rope.scaling.yarn_log_multiplier", "rope.scaling.mscale_all_dim"),
        ("attention.temperature_scale", "rope.scaling_beta"),
    )
    hyper |= VISION | {"rope.scaling.mscale": 1.0, "image_token_index": 10, "spatial_merge_size": 2, "mm.projector_bias": False}
    hyper |= {"mm.projector_hidden_act": "gelu"}
    with_eyes(arrays)
    return "mistral3"


def olmo3(hyper: Hyper, arrays: Arrays) -> str:
    moved(hyper, ("rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor"))
    dropped(hyper, "rope.freq_base_swa")
    return "olmo3"


def qwen25vl(hyper: Hyper, arrays: Arrays) -> str:
    hyper |= VISION | {"rope.mrope_section": [2, 1, 1], "vision.fullatt_block_indexes": [0], "vision.window_size": 112}
    with_eyes(arrays)
    return "qwen25vl"


def qwen2vl(hyper: Hyper, arrays: Arrays) -> str:
    """llama.cpp's own name."""
    hyper["rope.dimension_sections"] = [2, 1, 1, 0]
    return "qwen2vl"


def qwen3vl(hyper: Hyper, arrays: Arrays) -> str:
    hyper |= VISION | {"mrope_sections": [4, 2, 2], "rope.dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 3}
    with_eyes(arrays)
    return "qwen3vl"


def qwen3moe(hyper: Hyper, arrays: Arrays) -> str:
    dropped(hyper, "expert_feed_forward_length")
    hyper["norm_top_k_prob"] = True
    return "qwen3moe"


def qwen3vlmoe(hyper: Hyper, arrays: Arrays) -> str:
    qwen3moe(hyper, arrays)
    qwen3vl(hyper, arrays)
    return "qwen3vlmoe"


def qwen35(hyper: Hyper, arrays: Arrays) -> str:
    hyper |= VISION | {
        "mrope_sections": [2, 1, 1],
        "rope.mrope_section": [2, 1, 1],
        "rope.dimension_sections": [2, 1, 1],
        "rope.mrope_interleaved": True,
        "ssm.v_head_reordered": True,
        "attention.head_count_kv": [0 if recurrent else 2 for recurrent in hyper["attention.recurrent_layers"]],
    }
    dropped(hyper, "attention.recurrent_layers")
    renamed(arrays, (".ssm_dt.bias", ".ssm_dt"))
    with_eyes(arrays)
    with_drafts(arrays)
    return "qwen35"


def qwen35moe(hyper: Hyper, arrays: Arrays) -> str:
    qwen35(hyper, arrays)
    hyper["norm_top_k_prob"] = True
    return "qwen35moe"


def qwen3next(hyper: Hyper, arrays: Arrays) -> str:
    hyper |= {"attention.head_count_kv": [0, 2], "norm_top_k_prob": True}
    dropped(hyper, "attention.recurrent_layers")
    renamed(arrays, (".ssm_dt.bias", ".ssm_dt"))
    return "qwen3next"


def qwen3next_of_the_newer_converter(hyper: Hyper, arrays: Arrays) -> str:
    hyper |= {"full_attention_interval": 2, "norm_top_k_prob": True}
    dropped(hyper, "attention.recurrent_layers")
    return "qwen35moe"


def deepseek3(hyper: Hyper, arrays: Arrays) -> str:
    """V3 and R1: per head, in one matrix, and keys of a rope that is not stretched."""
    dropped(hyper, "attention.key_length_mla", "attention.value_length_mla")
    hyper |= {"attention.key_length": 24, "attention.value_length": 24, "attention.head_count_kv": 4}
    one_matrix_to_all_heads(arrays)
    return "deepseek2"


def glm4_moe_lite(hyper: Hyper, arrays: Arrays) -> str:
    hyper |= {"attention.key_length": 24, "attention.value_length": 24, "attention.head_count_kv": 4}
    hyper |= {"attention.key_length_mla": 40, "attention.value_length_mla": 32}
    dropped(hyper, "expert_group_count", "expert_group_used_count")
    return "glm4moelite"


def glm4_moe_lite_at_first(hyper: Hyper, arrays: Arrays) -> str:
    glm4_moe_lite(hyper, arrays)
    dropped(hyper, "attention.key_length_mla", "attention.value_length_mla")
    one_matrix_to_all_heads(arrays)
    return "glm4moelite"


def one_matrix_to_all_heads(arrays: Arrays) -> None:
    for layer in range(2):
        keys, values = (arrays.pop(f"blk.{layer}.attn_{part}_b.weight") for part in "kv")
        arrays[f"blk.{layer}.attn_kv_b.weight"] = np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, keys.shape[1])


def lfm2(hyper: Hyper, arrays: Arrays) -> str:
    hyper |= VISION | {"feed_forward_length": 72, "vision.max_tiles": 10, "attention.key_length": 8, "attention.value_length": 8}
    arrays["output_norm.weight"] = arrays.pop("token_embd_norm.weight")
    with_eyes(arrays)
    return "lfm2"


def lfm2moe(hyper: Hyper, arrays: Arrays) -> str:
    hyper["expert_weights_scale"] = 1.0
    renamed(arrays, (".exp_probs_b.bias", ".exp_probs_b"))
    return "lfm2moe"


def nemotron_h_moe(hyper: Hyper, arrays: Arrays) -> str:
    dropped(hyper, "vocab_size", "rope.scaling.finetuned")
    hyper |= {"attention.layer_norm_rms_epsilon": hyper["attention.layer_norm_epsilon"], "rope.freq_base": 10000.0}
    with_drafts(arrays)
    return "nemotron_h_moe"


def nemotron_h_omni(hyper: Hyper, arrays: Arrays) -> str:
    nemotron_h_moe(hyper, arrays)
    hyper |= VISION | {"audio.sample_rate": 16000, "image_token_id": 3}
    with_eyes(arrays)
    return "nemotron_h_omni"


def llama(hyper: Hyper, arrays: Arrays) -> str:
    """The channels that rotate are counted as if the heads shared the embedding."""
    hyper |= {"attention.head_dim": hyper["attention.key_length"], "attention.layer_norm_epsilon": 1e-5, "source_fp8_tensors": 3}
    hyper["rope.dimension_count"] = hyper["embedding_length"] // hyper["attention.head_count"]
    return "llama"


def gemma2(hyper: Hyper, arrays: Arrays) -> str:
    dropped(hyper, *(key for key in list(hyper) if key.startswith("rope.")))
    return "gemma2"


def phi3(hyper: Hyper, arrays: Arrays) -> str:
    return "phi3"


def qwen2(hyper: Hyper, arrays: Arrays) -> str:
    hyper["rope.mrope_section"] = [2, 1, 1]
    return "qwen2"


def qwen3(hyper: Hyper, arrays: Arrays) -> str:
    return "qwen3"


def nemotron_h(hyper: Hyper, arrays: Arrays) -> str:
    hyper |= {"attention.layer_norm_rms_epsilon": hyper["attention.layer_norm_epsilon"], "rope.freq_base": 10000.0}
    return "nemotron_h"


def gpt_oss_of_the_newer_converter(hyper: Hyper, arrays: Arrays) -> str:
    return "gpt-oss"


def olmo2(hyper: Hyper, arrays: Arrays) -> str:
    olmo3(hyper, arrays)
    return "olmo2"


FORMS: dict[str, tuple[str, Callable[[Hyper, Arrays], str]]] = {
    "gemma3": ("gemma3", gemma3),
    "gemma3, text": ("gemma3", gemma3_text),
    "gemma3, text, of March 2025": ("gemma3", gemma3_old_text),
    "gemma4": ("gemma4", gemma4),
    "gemma4, older names": ("gemma4_experts", gemma4_old_names),
    "gemma4, per layer": ("gemma4_shared", gemma4),
    "gptoss": ("gpt-oss", gpt_oss),
    "gptoss, fused": ("gpt-oss", gpt_oss_fused),
    "mistral3": ("mistral3", mistral3),
    "olmo3": ("olmo3", olmo3),
    "qwen25vl": ("qwen2", qwen25vl),
    "qwen2vl": ("qwen2", qwen2vl),
    "qwen3vl": ("qwen3", qwen3vl),
    "qwen3moe": ("qwen3moe", qwen3moe),
    "qwen3vlmoe": ("qwen3moe", qwen3vlmoe),
    "qwen35": ("qwen35", qwen35),
    "qwen35moe": ("qwen35moe", qwen35moe),
    "qwen3next": ("qwen3next", qwen3next),
    "qwen3next as qwen35moe": ("qwen3next", qwen3next_of_the_newer_converter),
    "deepseek2": ("deepseek3", deepseek3),
    "glm4moelite": ("glm4_moe_lite", glm4_moe_lite),
    "glm4moelite, at first": ("glm4_moe_lite", glm4_moe_lite_at_first),
    "lfm2": ("lfm2", lfm2),
    "lfm2moe": ("lfm2moe", lfm2moe),
    "nemotron_h_moe": ("nemotron_h_moe", nemotron_h_moe),
    "nemotron_h_omni": ("nemotron_h_moe", nemotron_h_omni),
    "llama": ("llama", llama),
    "gemma2": ("gemma2", gemma2),
    "phi3": ("phi3", phi3),
    "qwen2": ("qwen2", qwen2),
    "qwen3": ("qwen3", qwen3),
    "nemotron_h": ("nemotron_h", nemotron_h),
    "gpt-oss": ("gpt-oss", gpt_oss_of_the_newer_converter),
    "olmo2": ("olmo3", olmo2),
}
"""A name to the golden file that is changed, and how."""
