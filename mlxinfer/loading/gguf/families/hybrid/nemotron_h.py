"""Nemotron-H."""

from __future__ import annotations

from ...architecture import ROTATED, GGUFArchitecture, TensorTable
from ...base_config import SIGMOID, Config, Source, attends, base_config, read_experts
from .mamba2 import MAMBA_TRANSFORMS, mamba_config, mamba_names


def _nemotron_h(source: Source) -> Config:
    """A layer with KV heads is attention, one with feed-forward channels an MLP or experts, any other Mamba 2."""
    hparams = source.hparams
    inner = hparams.per_layer("feed_forward_length") or []
    rms = "attention.layer_norm_rms_epsilon"
    hparams.take("attention.layer_norm_epsilon")
    config = base_config(source, "nemotron_h", ropeless=True, eps=rms if hparams.has(rms) else "attention.layer_norm_epsilon")
    layers = config["num_hidden_layers"]
    if len(inner) < layers:
        raise hparams.error("feed_forward_length", f"must hold a number for each of the {layers} layers")
    moe = hparams.integer("expert_count", 0, low=0)
    fed = "E" if moe else "-"
    letters = ["*" if flag else fed if inner[layer] else "M" for layer, flag in enumerate(attends(source, layers))]
    for key in ("rope.dimension_count", "rope.freq_base"):
        hparams.take(key)
    found = config | {
        "hybrid_override_pattern": "".join(letters),
        "intermediate_size": max(inner) or 1,
        "layer_norm_epsilon": config.pop("rms_norm_eps"),
        "use_conv_bias": source.has_any("ssm_conv1d.bias"),
        "mlp_bias": source.has_any("ffn_up.bias"),
        **mamba_config(source, "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"),
    }
    return found | (_nemotron_experts(source) if moe else {})


def _nemotron_experts(source: Source) -> Config:
    hparams = source.hparams
    latent = hparams.optional_integer("moe_latent_size")
    return {key: value for key, value in read_experts(source, SIGMOID).items() if key != "first_k_dense_replace"} | {
        "moe_shared_expert_intermediate_size": hparams.integer("expert_shared_feed_forward_length", 0, low=0),
        "moe_latent_size": latent,
    }


_NEMOTRON = {
    **mamba_names("mixer"),
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
    MAMBA_TRANSFORMS | ROTATED,
    {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"},
    "backbone.layers",
)


ARCHITECTURES = {
    "nemotron_h": GGUFArchitecture(_nemotron_h, _NEMOTRON_TABLE),
    "nemotron_h_moe": GGUFArchitecture(_nemotron_h, _NEMOTRON_TABLE),
}
