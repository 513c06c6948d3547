"""A model that can only say what stands in its own context: if a row sees another's keys or values, it says it."""

from __future__ import annotations

import mlx.core as mx

from mlxinfer.models import build
from mlxinfer.models.decoder import Model

from ..models.plain_weights import PlainWeights

VOCABULARY = 128


def parrot() -> Model:
    """One attention layer over one-hot embeddings: queries are zero, so a token's value reaches the logits as often as it was said."""
    size = VOCABULARY
    eye, nothing = mx.eye(size), mx.zeros((size, size))
    layer = "model.layers.0"
    tensors: dict[str, mx.array] = {
        "model.embed_tokens.weight": eye,
        "model.norm.weight": mx.ones((size,)),
        "lm_head.weight": 10.0 * eye,
        f"{layer}.input_layernorm.weight": mx.ones((size,)),
        f"{layer}.post_attention_layernorm.weight": mx.ones((size,)),
        f"{layer}.self_attn.q_proj.weight": nothing,
        f"{layer}.self_attn.k_proj.weight": eye,
        f"{layer}.self_attn.v_proj.weight": eye,
        f"{layer}.self_attn.o_proj.weight": 1000.0 * eye,
        f"{layer}.mlp.gate_proj.weight": nothing,
        f"{layer}.mlp.up_proj.weight": nothing,
        f"{layer}.mlp.down_proj.weight": nothing,
    }
    config = {
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": size,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": size,
        "vocab_size": size,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    return build(config, PlainWeights(dict(tensors)))
