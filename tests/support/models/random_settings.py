"""Settings of checkpoints, drawn at random for each family: sizes that are no powers of two, and the options that the family has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mlxinfer.models.common import FULL, LINEAR, SLIDING

from .tiny import VOCAB

Settings = dict[str, Any]
FAMILIES: dict[str, Callable[[Draw], Settings]] = {}
"""By model type."""
BASE: Settings = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


class Draw:
    """Settings that many families have."""

    def __init__(self, *seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def number(self, low: int, high: int) -> int:
        return int(self._random.integers(low, high + 1))

    def factor(self, low: float, high: float) -> float:
        return round(float(self._random.uniform(low, high)), 4)

    def one(self, *choices: Any) -> Any:
        return choices[self.number(0, len(choices) - 1)]

    def maybe(self) -> bool:
        return bool(self.number(0, 1))

    def each(self, count: int, *choices: Any) -> list[Any]:
        return [self.one(*choices) for _ in range(count)]

    def sizes(self) -> Settings:
        return {
            "hidden_size": self.one(32, 40, 60, 64, 96),
            "intermediate_size": self.one(24, 48, 72, 100),
            "num_hidden_layers": self.number(1, 4),
            "rms_norm_eps": self.one(1e-6, 1e-5, 1e-3),
            "tie_word_embeddings": self.maybe(),
        }

    def heads(self, *dims: int) -> Settings:
        kv = self.one(1, 2, 3)
        dim = self.one(*(dims or (8, 12, 16, 20, 24, 32)))
        return {"num_attention_heads": kv * self.one(1, 2, 3), "num_key_value_heads": kv, "head_dim": dim}

    def divided(self, settings: Settings) -> Settings:
        """With heads that divide the rows evenly."""
        kv = self.one(1, 2)
        heads = kv * self.one(1, 2, 3)
        return settings | {"num_attention_heads": heads, "num_key_value_heads": kv, "hidden_size": heads * self.one(8, 16, 24)}

    def rope(self, *partial: float) -> Settings:
        scaled: list[Settings] = [
            {"rope_type": "default"},
            {"rope_type": "linear", "factor": self.factor(1.5, 4)},
            {"rope_type": "dynamic", "factor": self.factor(1.5, 4)},
            {"rope_type": "yarn", "factor": self.factor(2, 8), "original_max_position_embeddings": 32, "truncate": self.maybe()},
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 24,
            },
        ]
        return self.one(*scaled) | {"rope_theta": self.one(1e4, 1e6)} | ({"partial_rotary_factor": self.one(*partial)} if partial else {})

    def groups(self) -> Settings:
        """Experts in groups."""
        groups, each = self.one(1, 2, 3), self.number(2, 4)
        kept = self.number(1, groups)
        return {
            "n_routed_experts": groups * each,
            "num_experts_per_tok": self.number(1, min(4, kept * each)),
            "n_group": groups,
            "topk_group": kept,
            "routed_scaling_factor": self.factor(0.5, 3),
            "norm_topk_prob": self.maybe(),
            "moe_intermediate_size": self.one(12, 16, 28, 32),
        }

    def experts(self) -> Settings:
        count = self.number(2, 6)
        return {"num_experts": count, "num_experts_per_tok": self.number(1, count), "moe_intermediate_size": self.one(12, 28, 32)}

    def latent(self) -> Settings:
        """Latent attention."""
        heads = self.one(2, 4)
        return self.sizes() | {
            "hidden_size": self.one(32, 48, 72),
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "kv_lora_rank": self.one(16, 24, 32, 64),
            "q_lora_rank": self.one(12, 16, 24),
            "qk_rope_head_dim": self.one(8, 12, 16),
            "qk_nope_head_dim": self.one(8, 16, 24),
            "v_head_dim": self.one(8, 16, 20, 24),
            "attention_bias": self.maybe(),
        }

    def latent_rope(self, **others: Any) -> Settings:
        """Of latent attention; with `others`, which yarn alone has, always yarn."""
        yarn = {"rope_type": "yarn", "factor": self.one(4.0, 40.0), "original_max_position_embeddings": self.one(16, 32)}
        yarn |= {"mscale": 1.0, "mscale_all_dim": self.one(1.0, 0.7), "beta_fast": 32, "beta_slow": 1}
        return {"rope_theta": 1e4} | (yarn | others if others else self.one({"rope_type": "default"}, yarn))

    def delta(self) -> Settings:
        """Gated delta nets."""
        keys = self.one(1, 2, 3)
        return {
            "linear_num_key_heads": keys,
            "linear_num_value_heads": keys * self.one(1, 2, 3),
            "linear_key_head_dim": self.one(8, 16, 24),
            "linear_value_head_dim": self.one(8, 12, 16),
            "linear_conv_kernel_dim": self.one(2, 3, 4),
        }


def family(draw: Callable[[Draw], Settings]) -> Callable[[Draw], Settings]:
    """The settings of the model type with the name of the function."""
    FAMILIES[draw.__name__] = draw
    return draw


@family
def ministral3(d: Draw) -> Settings:
    rope = d.latent_rope(rope_theta=1e6, llama_4_scaling_beta=d.one(0.1, 0.3))
    return d.sizes() | d.heads() | {"rope_parameters": rope, "sliding_window": d.one(None, 13)}


@family
def olmo3(d: Draw) -> Settings:
    s = d.sizes()
    full = d.rope()
    full.pop("truncate", None)  # transformers reads it from a single rope only
    ropes = {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": d.one(5e5, 1e4)}}
    windows = {"layer_types": d.each(s["num_hidden_layers"], FULL, SLIDING), "sliding_window": d.number(1, 60)}
    return s | d.heads() | windows | {"attention_bias": d.maybe(), "rope_parameters": ropes}


@family
def glm4(d: Draw) -> Settings:
    return d.sizes() | d.heads(8, 16, 24) | {"rope_parameters": d.rope(0.5, 1.0), "attention_bias": d.maybe()}


@family
def glm4_moe(d: Draw) -> Settings:
    s = d.sizes() | d.heads(8, 16, 24) | d.groups()
    s |= {"rope_parameters": d.rope(0.5, 1.0), "attention_bias": d.maybe(), "use_qk_norm": d.maybe()}
    return s | {"n_shared_experts": d.number(1, 2), "first_k_dense_replace": d.number(0, s["num_hidden_layers"])}


@family
def cohere2(d: Draw) -> Settings:
    s = d.divided(d.sizes())
    s |= {"layer_types": d.each(s["num_hidden_layers"], FULL, SLIDING), "sliding_window": d.number(1, 60)}
    return s | {"layer_norm_eps": s.pop("rms_norm_eps"), "logit_scale": d.factor(0.05, 1), "attention_bias": d.maybe()}


@family
def exaone4(d: Draw) -> Settings:
    s = d.sizes() | d.heads() | {"rope_parameters": d.rope()}
    layers = s["num_hidden_layers"]
    if d.maybe():
        return s | {"sliding_window": None, "layer_types": [FULL] * layers}
    return s | {"sliding_window": d.number(1, 60), "sliding_window_pattern": 4, "layer_types": d.each(layers, FULL, SLIDING)}


@family
def hunyuan_v1_dense(d: Draw) -> Settings:
    alpha = {"rope_type": "dynamic", "alpha": d.one(50.0, 1000.0), "factor": 1.0}
    rope = d.one(alpha, {"rope_type": "default"}, {"rope_type": "dynamic", "factor": 2.0}) | {"rope_theta": d.one(1e4, 1e6)}
    return d.sizes() | d.heads() | {"rope_parameters": rope, "attention_bias": d.maybe()}


@family
def seed_oss(d: Draw) -> Settings:
    biases = {key: d.maybe() for key in ("attention_bias", "attention_out_bias", "mlp_bias")}
    return d.sizes() | d.heads() | biases | {"rope_parameters": d.rope()}


@family
def ernie4_5(d: Draw) -> Settings:
    return d.sizes() | d.heads() | {"rope_parameters": d.rope(), "use_bias": d.maybe()}


@family
def ernie4_5_moe(d: Draw) -> Settings:
    s, experts = d.sizes() | d.heads() | {"rope_parameters": d.rope()}, d.number(2, 6)
    s |= {"moe_k": d.number(1, experts), "moe_num_experts": experts, "moe_intermediate_size": d.one(12, 32)}
    s |= {"moe_num_shared_experts": d.number(0, 2), "moe_layer_start_index": d.number(0, 2), "moe_layer_interval": d.number(1, 2)}
    return s | {"moe_layer_end_index": d.one(-1, s["num_hidden_layers"] - 1)}


@family
def minimax_m2(d: Draw) -> Settings:
    rope = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": d.one(0.25, 0.5, 1.0)}
    experts = d.number(2, 6)
    s = {"num_local_experts": experts, "num_experts_per_tok": d.number(1, experts), "rope_parameters": rope}
    return d.sizes() | d.heads(8, 16, 24, 32) | s


def _convolutions(d: Draw) -> Settings:
    s = d.divided(d.sizes())
    s |= {"norm_eps": s.pop("rms_norm_eps"), "conv_bias": d.maybe(), "conv_L_cache": d.one(2, 3, 4)}
    return s | {"layer_types": d.each(s["num_hidden_layers"], "conv", FULL)}


@family
def lfm2(d: Draw) -> Settings:
    s = {"block_multiple_of": d.one(8, 32), "block_ffn_dim_multiplier": d.one(1.0, 1.5)}
    return _convolutions(d) | s | {"block_auto_adjust_ff_dim": d.maybe()}


@family
def lfm2_moe(d: Draw) -> Settings:
    s = _convolutions(d) | d.experts()
    s |= {"num_dense_layers": d.number(0, s["num_hidden_layers"]), "routed_scaling_factor": d.factor(0.5, 2)}
    return s | {"norm_topk_prob": d.maybe(), "use_expert_bias": d.maybe()}


@family
def gemma4_text(d: Draw) -> Settings:
    layers = d.number(2, 6)
    kinds = [*d.each(layers - 1, SLIDING, FULL), FULL]
    s = d.sizes() | d.heads(8, 16, 24) | {"num_hidden_layers": layers, "layer_types": kinds, "sliding_window": d.number(2, 60)}
    s |= {"global_head_dim": d.one(16, 24, 48), "final_logit_softcapping": d.one(None, 3.0)}
    s |= {"hidden_size_per_layer_input": d.one(0, 8, 12), "vocab_size_per_layer_input": VOCAB}
    if d.maybe():
        s |= {"num_global_key_value_heads": d.one(1, s["num_attention_heads"]), "attention_k_eq_v": True}
    if d.maybe():
        s |= {"enable_moe_block": True, "num_experts": d.number(2, 5), "top_k_experts": d.number(1, 2), "moe_intermediate_size": 28}
    shared = d.number(0, layers - 1)
    # transformers shares layers of models with inputs per layer only
    if s["hidden_size_per_layer_input"] and all(kind in kinds[: layers - shared] for kind in kinds[layers - shared :]):
        s |= {"num_kv_shared_layers": shared, "use_double_wide_mlp": d.maybe()}
    return s


@family
def nemotron_h(d: Draw) -> Settings:
    s, mamba = d.sizes() | d.heads() | d.groups(), d.one(2, 4, 6)
    s |= {"layer_norm_epsilon": s.pop("rms_norm_eps"), "hybrid_override_pattern": "".join(d.each(s["num_hidden_layers"], *"M*-E"))}
    s |= {"mamba_num_heads": mamba, "mamba_head_dim": d.one(8, 16, 24), "ssm_state_size": d.one(8, 16, 24), "n_groups": d.one(1, 2)}
    s |= {"conv_kernel": d.one(2, 4), "moe_shared_expert_intermediate_size": d.one(20, 64), "moe_latent_size": d.one(None, 16, 20)}
    return s | {key: d.maybe() for key in ("use_conv_bias", "use_bias", "mlp_bias", "attention_bias")}


@family
def granitemoehybrid(d: Draw) -> Settings:
    s, experts = d.divided(d.sizes()), d.one(0, 3, 5)
    s |= {"num_local_experts": experts, "num_experts_per_tok": d.number(1, experts) if experts else 0}
    s |= {"shared_intermediate_size": d.one(24, 64), "layer_types": d.each(s["num_hidden_layers"], LINEAR, FULL)}
    s |= {"mamba_n_heads": 4, "mamba_d_head": s["hidden_size"] // 2, "mamba_d_state": d.one(8, 16), "mamba_d_conv": d.one(2, 4)}
    s |= {"mamba_n_groups": d.one(1, 2), "position_embedding_type": d.one("rope", "nope")}
    s |= {key: d.factor(0.2, 2) for key in ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")}
    return s | {key: d.maybe() for key in ("mamba_conv_bias", "mamba_proj_bias", "attention_bias")}


@family
def falcon_h1(d: Draw) -> Settings:
    s, heads, dim = d.sizes() | d.heads() | {"rope_parameters": d.rope()}, d.one(2, 4), d.one(8, 16, 24)
    s |= {"mamba_d_ssm": heads * dim, "mamba_n_heads": heads, "mamba_d_head": dim, "mamba_d_state": d.one(8, 16)}
    s |= {"mamba_n_groups": d.one(1, 2), "mamba_d_conv": d.one(2, 4), "projectors_bias": False}
    s |= {key: d.maybe() for key in ("mamba_conv_bias", "mamba_rms_norm", "mamba_norm_before_gate")}
    names = ("embedding", "lm_head", "attention_in", "attention_out", "ssm_in", "ssm_out", "key")
    s |= {f"{name}_multiplier": d.factor(0.3, 1.5) for name in names}
    return s | {"ssm_multipliers": [d.factor(0.4, 3) for _ in range(5)], "mlp_multipliers": [d.factor(0.5, 1), d.factor(0.5, 1)]}


@family
def deepseek_v2(d: Draw) -> Settings:
    s = d.latent() | d.groups() | {"q_lora_rank": d.one(None, 16), "n_shared_experts": d.number(1, 2), "norm_topk_prob": False}
    s |= {"topk_method": d.one("greedy", "group_limited_greedy"), "rope_parameters": d.latent_rope()}
    return s | {"first_k_dense_replace": d.number(0, s["num_hidden_layers"])}


@family
def deepseek_v3(d: Draw) -> Settings:
    s = d.latent() | d.groups() | {"q_lora_rank": d.one(None, 16), "n_shared_experts": d.number(1, 2), "rope_interleave": d.maybe()}
    return s | {"rope_parameters": d.latent_rope(), "first_k_dense_replace": d.number(0, s["num_hidden_layers"])}


@family
def glm4_moe_lite(d: Draw) -> Settings:
    s = d.latent() | d.groups() | {"n_shared_experts": d.number(1, 2), "rope_interleave": d.maybe(), "rope_parameters": d.latent_rope()}
    return s | {"mlp_layer_types": d.each(s["num_hidden_layers"], "sparse", "dense")}


@family
def mistral4(d: Draw) -> Settings:
    s = d.latent() | d.groups() | {"n_shared_experts": d.number(1, 2), "rope_parameters": d.latent_rope(llama_4_scaling_beta=0.3)}
    return s | {"first_k_dense_replace": d.number(0, s["num_hidden_layers"])}


@family
def minicpm3(d: Draw) -> Settings:
    s = d.latent() | {"scale_emb": d.one(1, 12), "scale_depth": d.factor(0.5, 2), "dim_model_base": d.one(8, 32)}
    pairs = s["qk_rope_head_dim"] // 2
    factors = {"short_factor": [1 + 0.1 * i for i in range(pairs)], "long_factor": [1.5 + 0.4 * i for i in range(pairs)]}
    long = {"rope_type": "longrope", **factors, "original_max_position_embeddings": d.one(48, 128)}
    return s | {"rope_parameters": d.one({"rope_type": "default"}, long) | {"rope_theta": 1e4}}


@family
def kimi_linear(d: Draw) -> Settings:
    s = d.latent() | d.groups() | {"q_lora_rank": d.one(None, 16)}
    layers = s["num_hidden_layers"]
    dense = d.number(0, layers)
    s |= {"num_local_experts": s.pop("n_routed_experts"), "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense)}
    s |= {"linear_head_dim": d.one(8, 16, 24), "linear_num_heads": d.one(1, 2, 3), "linear_conv_kernel_dim": d.one(2, 4)}
    return s | {"layer_types": d.each(layers, LINEAR, FULL)}


def _hybrid(d: Draw) -> Settings:
    s = d.sizes() | d.heads(16, 24, 32) | d.delta()
    return s | {"layer_types": d.each(s["num_hidden_layers"], LINEAR, FULL)}


@family
def qwen3_5_text(d: Draw) -> Settings:
    return _hybrid(d)


@family
def qwen3_5_moe_text(d: Draw) -> Settings:
    return _hybrid(d) | d.experts() | {"shared_expert_intermediate_size": d.one(12, 32)}


@family
def qwen3_next(d: Draw) -> Settings:
    s = _hybrid(d) | d.experts() | {"shared_expert_intermediate_size": d.one(12, 32), "partial_rotary_factor": d.one(0.25, 0.5, 1.0)}
    return s | {"decoder_sparse_step": d.one(1, 2), "norm_topk_prob": d.maybe(), "mlp_only_layers": d.one([], [0])}
