"""Packed matrices give what their unpacked values give, in every family and format."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.models.plain_weights import PlainWeights, RandomWeights, unpacked
from support.models.tiny import logits_of, random_tokens

from mlxinfer.models import FAMILIES, build
from mlxinfer.nn.packing import arrays
from mlxinfer.nn.weights import Format, Quantized

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
MAMBA = {"mamba_d_state": 16, "mamba_n_groups": 2}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16}
OWN: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {key: value for key, value in MOE.items() if key != "shared_expert_intermediate_size"},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_next": {**MOE, **DELTA, "layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_text": {**DELTA, "layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_moe_text": {**MOE, **DELTA, "layer_types": ["linear_attention", "full_attention"]},
    "glm4_moe": ROUTED,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma4_text": {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 96, "global_head_dim": 32},
    "deepseek_v2": {**ROUTED, **LATENT},
    "deepseek_v3": {**ROUTED, **LATENT, "n_group": 2, "topk_group": 1},
    "glm4_moe_lite": {**ROUTED, **LATENT},
    "mistral4": {**ROUTED, **LATENT},
    "minicpm3": LATENT,
    "kimi_linear": {
        **LATENT,
        "q_lora_rank": None,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "linear_num_heads": 2,
        "linear_head_dim": 32,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 32,
        "num_expert_group": 2,
        "topk_group": 1,
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "nemotron_h": {
        **ROUTED,
        "hybrid_override_pattern": "ME",
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "moe_shared_expert_intermediate_size": 64,
    },
    "granitemoehybrid": {
        **MAMBA,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "shared_intermediate_size": 64,
        "layer_types": ["mamba", "attention"],
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, "num_experts": 4, "moe_intermediate_size": 32},
}
TOKENS = random_tokens(20)


def config(model_type: str) -> dict[str, Any]:
    return {"model_type": model_type, **SIZES, **OWN.get(model_type, {})}


def difference(model_type: str, weights: RandomWeights) -> float:
    packed = build(config(model_type), weights)
    assert any(isinstance(matrix, Quantized) for matrix in weights.asked.values())
    plain = build(config(model_type), PlainWeights(unpacked(weights.asked)))
    return float(np.abs(logits_of(packed, TOKENS) - logits_of(plain, TOKENS)).max())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_packed_model_gives_the_logits_of_its_values(model_type: str) -> None:
    assert difference(model_type, RandomWeights(lambda name: Format(4, 32))) < 1e-3


@pytest.mark.parametrize(
    "form", [Format(2, 32), Format(3, 32), Format(8, 32), Format(4, 32, "mxfp4"), Format(8, 32, "mxfp8"), Format(4, 16, "nvfp4")], ids=str
)
def test_every_format_serves_matrices_embedding_and_tied_head(form: Format) -> None:
    weights = RandomWeights(lambda name: form if "o_proj" not in name else None, tied=True)
    assert difference("llama", weights) < 1e-3


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "gpt_oss", "qwen3_next"])
def test_layers_may_differ_in_format(model_type: str) -> None:
    """As converters leave them: some parts of a joined projection in more bits than others, some plain."""
    kinds = {"v_proj": Format(8, 32), "k_proj": None, "up_proj": Format(6, 32), "in_proj_ba": Format(8, 64)}

    def form(name: str) -> Format | None:
        return next((kind for part, kind in kinds.items() if part in name), Format(4, 32))

    assert difference(model_type, RandomWeights(form)) < 1e-3


@pytest.mark.parametrize("model_type", FAMILIES)
def test_half_precision_runs_and_stays_close(model_type: str) -> None:
    weights = RandomWeights()
    exact = logits_of(build(config(model_type), weights), TOKENS[:8])
    halves = {name: matrix.weight.astype(mx.float16) for name, matrix in weights.asked.items()}
    model = build(config(model_type), PlainWeights(halves))
    assert np.abs(logits_of(model, TOKENS[:8]) - exact).max() < 0.1 * np.abs(exact).max()
    kept = {array.dtype for array in arrays(model)} - {mx.float16, mx.int32, mx.uint32}
    assert kept <= {mx.float32}


def test_parts_are_announced_as_they_are_finished() -> None:
    seen: list[object] = []
    model = build(config("llama"), RandomWeights(), ready=seen.append)
    assert len(seen) == 2 + SIZES["num_hidden_layers"]
    assert {id(array) for part in seen for array in arrays(part)} == {id(array) for array in arrays(model)}
