"""From llama.cpp's tensor names to those of mlx-lm's converted directories, for architectures that attend to keys and values of their own.

Sources: `gguf/constants.py` for the names, and the converter's classes for what they do to the tensors; `transforms.py` undoes that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from ...util.dataclass import dataclass
from .transforms import Transform, flat, half_rotation, without_one

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
}
