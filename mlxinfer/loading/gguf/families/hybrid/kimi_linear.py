"""Kimi Linear."""

from __future__ import annotations

from ...architecture import GGUFArchitecture, TensorTable
from ...base_config import SIGMOID, Config, Source, attends, layer_types, read_experts
from ...transforms import by_head, conv_kernel, decay
from ..deepseek import DEEPSEEK, latent_config


def _kimi_linear(source: Source) -> Config:
    hparams = source.hparams
    config = latent_config(source, "kimi_linear", None) | read_experts(source, SIGMOID)
    layers, dense = config["num_hidden_layers"], config.pop("first_k_dense_replace")
    linear = attends(source, layers).index(False) if False in attends(source, layers) else 0
    dim = hparams.integer("kda.head_dim")
    return config | {
        "norm_topk_prob": True,
        "layer_types": layer_types(source, layers),
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(layers)],
        "linear_conv_kernel_dim": hparams.integer("ssm.conv_kernel"),
        "linear_head_dim": dim,
        "linear_num_heads": source.rows(f"blk.{linear}.attn_q.weight") // dim,
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


ARCHITECTURES = {
    "kimi-linear": GGUFArchitecture(
        _kimi_linear,
        TensorTable(
            DEEPSEEK | _KIMI,
            {"ssm_a": by_head(decay(grouped=False)), **{f"ssm_conv1d_{part}": conv_kernel(grouped=False) for part in "qkv"}},
        ),
    ),
}
