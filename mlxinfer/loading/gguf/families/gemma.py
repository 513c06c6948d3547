"""Gemma 2 and 3."""

from __future__ import annotations

from ..architecture import SANDWICH, GGUFArchitecture, TensorTable
from ..base_config import Config, Source, base_config, windowed_layers
from ..transforms import without_one


def _gemma2(source: Source) -> Config:
    hparams = source.hparams
    config = _gemma(source, "gemma2", 46)
    return config | {
        "sliding_window": hparams.integer("attention.sliding_window", 4096),
        "layer_types": windowed_layers(source, config["num_hidden_layers"], 2),
        "attn_logit_softcapping": hparams.positive("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": hparams.positive("final_logit_softcapping", 30.0),
    }


def _gemma3(source: Source) -> Config:
    hparams = source.hparams
    config = _gemma(source, "gemma3_text", 62)
    window = hparams.integer("attention.sliding_window", 0, low=0)
    layers = config["num_hidden_layers"]
    cap = hparams.number("final_logit_softcapping", 0.0)
    return config | {
        "sliding_window": window or config["max_position_embeddings"],
        "layer_types": windowed_layers(source, layers, 6) if window else ["full_attention"] * layers,
        "rope_local_base_freq": hparams.positive("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": cap or None,
    }


def _gemma(source: Source, model_type: str, layers_of_27b: int) -> Config:
    """The 27B models scale queries by hidden size / heads, all others by the head's size. The file does not say so."""
    config = base_config(source, model_type) | {"intermediate_size": source.hparams.integer("feed_forward_length")}
    largest = config["num_hidden_layers"] == layers_of_27b
    scalar = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    return config | {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": scalar}


_NORMS = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm", "output_norm")
_SHIFTED = dict.fromkeys(_NORMS, without_one)


ARCHITECTURES = {
    "gemma2": GGUFArchitecture(_gemma2, TensorTable(SANDWICH, _SHIFTED)),
    "gemma3": GGUFArchitecture(_gemma3, TensorTable(SANDWICH, _SHIFTED)),
}
