"""From llama.cpp's tensor names to those of mlx-lm's converted directories, one table for each architecture.

Sources: `gguf/constants.py` for the names, and the converter's classes for what they do to the tensors; `transforms.py` undoes that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from ...util.dataclass import dataclass
from .transforms import (
    Transform,
    by_head,
    conv_kernel,
    decay,
    flat,
    grouped_columns,
    grouped_rows,
    grouped_value_rows,
    half_rotation,
    one_row,
    without_one,
)

MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
QKV = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
ATTENTION = {**QKV, "attn_norm": "input_layernorm", "attn_output": "self_attn.o_proj"}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
LLAMA = {**ATTENTION, **MLP, "ffn_norm": "post_attention_layernorm"}
_POST_NORM = {**ATTENTION, **MLP, "post_attention_norm": "post_attention_layernorm"}
SANDWICH = {
    **ATTENTION,
    **QK_NORMS,
    **MLP,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def experts(router: str, experts: str) -> dict[str, str]:
    """The places of a router and of stacked experts."""
    return {"ffn_gate_inp": router} | {f"ffn_{part}_exps": f"{experts}.{part}_proj" for part in ("gate", "up", "down")}


def shared_expert(name: str) -> dict[str, str]:
    """The places of what every token takes next to them."""
    return {f"ffn_{part}_shexp": f"{name}.{part}_proj" for part in ("gate", "up", "down")}


EXPERTS = experts("mlp.gate", "mlp.switch_mlp")
BIASED = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
"""Added to scores where experts are chosen."""


@dataclass(frozen=True, slots=True)
class TensorTable:
    """Where the tensors of one architecture go, and what is done to them."""

    layer: Mapping[str, str]
    """llama.cpp's names within a layer to the model's, without a suffix where both a weight and a bias may come."""
    transforms: Mapping[str, Transform] = field(default_factory=dict)
    """By llama.cpp's names, what its converter did that has to be undone."""
    model: Mapping[str, str] = field(default_factory=lambda: MODEL)
    """Names outside of layers."""
    layers: str = "model.layers"
    """What layers are called, before their number."""
    joined: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Matrices that are one of the model's, by each of their names: both in the order of their rows. The first has a place in `layer`."""


ROTATED = {"attn_q": half_rotation("num_attention_heads"), "attn_k": half_rotation("num_key_value_heads")}
_NORMS = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm", "output_norm")
_SHIFTED = dict.fromkeys(_NORMS, without_one)

_SHARED_EXPERT = {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"} | shared_expert("mlp.shared_expert")
_DELTA = {
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "post_attention_norm": "post_attention_layernorm",
}
_QWEN35 = {
    **ATTENTION,
    **QK_NORMS,
    **_DELTA,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
}
_GROUPED: dict[str, Transform] = {
    "attn_qkv": grouped_value_rows,
    "attn_gate": grouped_rows,
    "ssm_alpha": grouped_rows,
    "ssm_beta": grouped_rows,
    "ssm_dt.bias": grouped_rows,
    "ssm_a": decay(grouped=True),
    "ssm_conv1d": conv_kernel(grouped=True),
    "ssm_out": grouped_columns,
}
_LATENT = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.embed_q",
    "attn_v_b": "self_attn.unembed_out",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    **MLP,
}
_DEEPSEEK = _LATENT | EXPERTS | shared_expert("mlp.shared_experts") | BIASED


def _mamba(name: str) -> dict[str, str]:
    return {
        "ssm_in": f"{name}.in_proj",
        "ssm_conv1d": f"{name}.conv1d",
        "ssm_dt.bias": f"{name}.dt_bias",
        "ssm_a": f"{name}.A_log",
        "ssm_d": f"{name}.D",
        "ssm_norm": f"{name}.norm",
        "ssm_out": f"{name}.out_proj",
    }


_MAMBA: dict[str, Transform] = {
    "ssm_a": flat(decay(grouped=False)),
    "ssm_d": flat(),
    "ssm_norm": flat(),
    "ssm_conv1d.weight": conv_kernel(grouped=False),
}
_KIMI = {
    "ssm_f_a": "self_attn.f_a_proj",
    "ssm_f_b": "self_attn.f_b_proj",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_a": "self_attn.A_log",
    "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
} | {f"ssm_conv1d_{part}": f"self_attn.{part}_conv.conv" for part in "qkv"}
_SHORT_CONV = {
    **QKV,
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_LFM2_MODEL = MODEL | {"token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"}
_NEMOTRON = {
    **_mamba("mixer"),
    **{f"attn_{part}": f"mixer.{part}_proj" for part in "qkv"},
    "attn_norm": "norm",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.switch_mlp.fc1",
    "ffn_down_exps": "mixer.switch_mlp.fc2",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
_NEMOTRON_TABLE = TensorTable(
    _NEMOTRON,
    _MAMBA | ROTATED,
    {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"},
    "backbone.layers",
)

TABLES: dict[str, TensorTable] = {
    "llama": TensorTable(LLAMA, ROTATED),
    "mixtral": TensorTable(LLAMA | experts("block_sparse_moe.gate", "block_sparse_moe.switch_mlp"), ROTATED),
    "qwen2": TensorTable(LLAMA),
    "qwen3": TensorTable(LLAMA | QK_NORMS),
    "qwen3moe": TensorTable(LLAMA | QK_NORMS | EXPERTS),
    "gemma2": TensorTable(SANDWICH, _SHIFTED),
    "gemma3": TensorTable(SANDWICH, _SHIFTED),
    "phi3": TensorTable(LLAMA | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "granite": TensorTable(LLAMA, ROTATED),
    "olmo2": TensorTable(SANDWICH),
    "smollm3": TensorTable(LLAMA, ROTATED),
    "gpt-oss": TensorTable(
        ATTENTION
        | experts("mlp.router", "mlp.experts")
        | {"attn_sinks.weight": "self_attn.sinks", "post_attention_norm": "post_attention_layernorm"}
    ),
    "mistral3": TensorTable(LLAMA, ROTATED),
    "glm4": TensorTable(
        ATTENTION
        | {
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        }
    ),
    "glm4moe": TensorTable(_POST_NORM | QK_NORMS | EXPERTS | shared_expert("mlp.shared_experts") | BIASED),
    "cohere2": TensorTable(ATTENTION | MLP),
    "exaone4": TensorTable(SANDWICH),
    "hunyuan-dense": TensorTable(LLAMA | {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}),
    "seed_oss": TensorTable(_POST_NORM),
    "ernie4_5": TensorTable(LLAMA),
    "ernie4_5-moe": TensorTable(
        LLAMA | EXPERTS | shared_expert("mlp.shared_experts") | {"exp_probs_b.bias": "mlp.e_score_correction_bias"},
        {"exp_probs_b.bias": flat()},
    ),
    "minimax-m2": TensorTable(
        LLAMA
        | QK_NORMS
        | experts("block_sparse_moe.gate", "block_sparse_moe.switch_mlp")
        | {"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"}
    ),
    "gemma4": TensorTable(
        SANDWICH
        | experts("router.proj", "experts.switch_glu")
        | {
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "layer_output_scale.weight": "layer_scalar",
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
        },
        model=MODEL
        | {
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
    ),
    # Layers with a state or a latent vector.
    "qwen3next": TensorTable(
        ATTENTION
        | QK_NORMS
        | EXPERTS
        | _SHARED_EXPERT
        | _DELTA
        | {"ssm_ba": "linear_attn.in_proj_ba", "ssm_in": "linear_attn.in_proj_qkvz"},
        {"ssm_a": decay(grouped=False), "ssm_conv1d": conv_kernel(grouped=False), "ffn_gate_inp_shexp": one_row},
    ),
    "qwen35": TensorTable(_QWEN35 | MLP, _GROUPED),
    "qwen35moe": TensorTable(_QWEN35 | EXPERTS | _SHARED_EXPERT, _GROUPED | {"ffn_gate_inp_shexp": one_row}),
    "deepseek2": TensorTable(_DEEPSEEK),
    "mistral4": TensorTable(_DEEPSEEK),
    "minicpm3": TensorTable(_LATENT),
    "kimi-linear": TensorTable(
        _DEEPSEEK | _KIMI,
        {"ssm_a": by_head(decay(grouped=False)), **{f"ssm_conv1d_{part}": conv_kernel(grouped=False) for part in "qkv"}},
    ),
    "granitehybrid": TensorTable(
        ATTENTION
        | _mamba("mamba")
        | experts("block_sparse_moe.router.layer", "block_sparse_moe.switch_mlp")
        | {
            "ffn_norm": "post_attention_layernorm",
            "ffn_gate": "shared_mlp.input_linear",
            "ffn_gate_shexp": "shared_mlp.input_linear",
            "ffn_down": "shared_mlp.output_linear",
            "ffn_down_shexp": "shared_mlp.output_linear",
        },
        _MAMBA | ROTATED,
        joined={f"ffn_{part}{end}": (f"ffn_gate{end}", f"ffn_up{end}") for part in ("gate", "up") for end in ("", "_shexp")},
    ),
    "nemotron_h": _NEMOTRON_TABLE,
    "nemotron_h_moe": _NEMOTRON_TABLE,
    "falcon-h1": TensorTable(
        ATTENTION
        | _mamba("mamba")
        | dict.fromkeys(("ffn_norm", "ffn_norm.weight"), "pre_ff_layernorm.weight")
        | {f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
        _MAMBA,
        MODEL | {"output_norm": "model.final_layernorm"},
    ),
    "lfm2": TensorTable(
        _SHORT_CONV | {"ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2"},
        {"shortconv.conv": conv_kernel(grouped=False)},
        _LFM2_MODEL,
    ),
    "lfm2moe": TensorTable(
        _SHORT_CONV
        | experts("feed_forward.gate", "feed_forward.switch_mlp")
        | {"exp_probs_b.bias": "feed_forward.expert_bias"}
        | {f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
        {"shortconv.conv": conv_kernel(grouped=False)},
        _LFM2_MODEL,
    ),
}
