"""Qwen 3 Next and 3.5: gated delta nets."""

from __future__ import annotations

from ...architecture import ATTENTION, EXPERTS, MLP, QK_NORMS, GGUFArchitecture, TensorTable, shared_expert_names
from ...base_config import Config, Source, base_config, with_sections
from ...transforms import Transform, conv_kernel, decay, grouped_columns, grouped_rows, grouped_value_rows, one_row
from ..qwen import qwen_experts


def _qwen3_next(source: Source) -> Config:
    shared = source.hparams.integer("expert_shared_feed_forward_length")
    config = _hybrid(source, "qwen3_next") | qwen_experts(source)
    return config | {"shared_expert_intermediate_size": shared, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _qwen3_5(source: Source) -> Config:
    return with_sections(source, _hybrid(source, "qwen3_5_text"))


def _qwen3_5_moe(source: Source) -> Config:
    hparams = source.hparams
    shared = hparams.integer("expert_shared_feed_forward_length")
    return with_sections(source, _hybrid(source, "qwen3_5_moe_text")) | qwen_experts(source) | {"shared_expert_intermediate_size": shared}


def _hybrid(source: Source, model_type: str) -> Config:
    hparams = source.hparams
    config = base_config(source, model_type, partial_rope=True)
    layers = config["num_hidden_layers"]
    period = hparams.integer("full_attention_interval", 4)
    recurrent = hparams.flags("attention.recurrent_layers", layers) or [(layer + 1) % period != 0 for layer in range(layers)]
    key_heads, value_heads = hparams.integer("ssm.group_count"), hparams.integer("ssm.time_step_rank")
    inner = hparams.integer("ssm.inner_size")
    if value_heads % key_heads:
        raise hparams.error("ssm.time_step_rank", f"is {value_heads}, not a multiple of the {key_heads} key heads")
    if inner % value_heads:
        raise hparams.error("ssm.inner_size", f"is {inner}, not a multiple of the {value_heads} heads")
    return config | {
        "intermediate_size": hparams.integer("feed_forward_length", 1, low=0) or 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "full_attention_interval": period,
        "layer_types": ["linear_attention" if flag else "full_attention" for flag in recurrent],
        "linear_conv_kernel_dim": hparams.integer("ssm.conv_kernel"),
        "linear_key_head_dim": hparams.integer("ssm.state_size"),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": inner // value_heads,
    }


_SHARED_EXPERT = {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"} | shared_expert_names("mlp.shared_expert")
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


ARCHITECTURES = {
    "qwen3next": GGUFArchitecture(
        _qwen3_next,
        TensorTable(
            ATTENTION
            | QK_NORMS
            | EXPERTS
            | _SHARED_EXPERT
            | _DELTA
            | {"ssm_ba": "linear_attn.in_proj_ba", "ssm_in": "linear_attn.in_proj_qkvz"},
            {"ssm_a": decay(grouped=False), "ssm_conv1d": conv_kernel(grouped=False), "ffn_gate_inp_shexp": one_row},
        ),
    ),
    "qwen35": GGUFArchitecture(_qwen3_5, TensorTable(_QWEN35 | MLP, _GROUPED)),
    "qwen35moe": GGUFArchitecture(
        _qwen3_5_moe, TensorTable(_QWEN35 | EXPERTS | _SHARED_EXPERT, _GROUPED | {"ffn_gate_inp_shexp": one_row})
    ),
}
