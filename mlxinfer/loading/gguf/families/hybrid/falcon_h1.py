"""Falcon H1."""

from __future__ import annotations

from ...architecture import ATTENTION, MODEL, GGUFArchitecture, TensorTable
from ...base_config import Config, Source, dense_config
from .mamba2 import MAMBA_TRANSFORMS, mamba_config, mamba_names


def _falcon_h1(source: Source) -> Config:
    """The weights include the constant factors. The norm, if present, follows the gate."""
    return dense_config(source, "falcon_h1") | {
        **mamba_config(source, "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"),
        "mamba_d_ssm": source.hparams.integer("ssm.inner_size"),
        "mamba_conv_bias": source.has_any("ssm_conv1d.bias"),
        "mamba_rms_norm": source.has_any("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        **dict.fromkeys(_FALCON_FACTORS, 1.0),
        "ssm_multipliers": [1.0] * 5,
        "mlp_multipliers": [1.0] * 2,
    }


_FALCON_FACTORS = (
    "embedding_multiplier",
    "lm_head_multiplier",
    "attention_in_multiplier",
    "attention_out_multiplier",
    "ssm_in_multiplier",
    "ssm_out_multiplier",
    "key_multiplier",
)


ARCHITECTURES = {
    "falcon-h1": GGUFArchitecture(
        _falcon_h1,
        TensorTable(
            ATTENTION
            | mamba_names("mamba")
            | dict.fromkeys(("ffn_norm", "ffn_norm.weight"), "pre_ff_layernorm.weight")
            | {f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
            MAMBA_TRANSFORMS,
            MODEL | {"output_norm": "model.final_layernorm"},
        ),
    ),
}
