"""GLM 4."""

from __future__ import annotations

from ..architecture import ATTENTION, BIASED, EXPERTS, POST_NORM, QK_NORMS, GGUFArchitecture, TensorTable, shared_expert_names
from ..base_config import SIGMOID, Config, Source, dense_config, read_experts


def _glm4(source: Source) -> Config:
    return dense_config(source, "glm4", partial_rope=True) | {"attention_bias": source.has("blk.0.attn_q.bias")}


def _glm4_moe(source: Source) -> Config:
    config = dense_config(source, "glm4_moe", partial_rope=True) | read_experts(source, SIGMOID)
    return config | {"attention_bias": source.has("blk.0.attn_q.bias"), "use_qk_norm": source.has("blk.0.attn_q_norm.weight")}


ARCHITECTURES = {
    "glm4": GGUFArchitecture(
        _glm4,
        TensorTable(
            ATTENTION
            | {
                "post_attention_norm": "post_self_attn_layernorm",
                "ffn_norm": "post_attention_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
                "ffn_up": "mlp.gate_up_proj",
                "ffn_down": "mlp.down_proj",
            }
        ),
    ),
    "glm4moe": GGUFArchitecture(
        _glm4_moe, TensorTable(POST_NORM | QK_NORMS | EXPERTS | shared_expert_names("mlp.shared_experts") | BIASED)
    ),
}
