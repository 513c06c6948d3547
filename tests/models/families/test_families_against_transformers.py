"""Random models of many sizes and settings, built by transformers in this process, must give its logits here as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models.tiny import VOCAB, logits_of, open_model, random_tokens, transformers_logits, write_with_transformers

pytestmark = pytest.mark.torch

LIMIT = 2e-3
TOKENS = random_tokens(100)

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 60,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GQA = {"num_attention_heads": 6, "num_key_value_heads": 3}
MQA = {"num_attention_heads": 6, "num_key_value_heads": 1}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 24}
DYNAMIC = {"rope_type": "dynamic", "factor": 3.0}
LINEAR = {"rope_type": "linear", "factor": 2.5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def longrope(pairs: int, **others: Any) -> dict[str, Any]:
    short, long = [1.0 + 0.07 * i for i in range(pairs)], [1.5 + 0.4 * i for i in range(pairs)]
    return {"rope_type": "longrope", "short_factor": short, "long_factor": long, **others}


def moe(experts: int, chosen: int, **others: Any) -> dict[str, Any]:
    return {"num_experts": experts, "num_experts_per_tok": chosen, "moe_intermediate_size": 28, **others}


def delta(kv: tuple[int, int], dims: tuple[int, int], **others: Any) -> dict[str, Any]:
    sizes = {
        "linear_num_key_heads": kv[0],
        "linear_num_value_heads": kv[1],
        "linear_key_head_dim": dims[0],
        "linear_value_head_dim": dims[1],
    }
    return {"head_dim": 16, **GQA, **sizes, **others}


FULL, SLIDING, RECURRENT = "full_attention", "sliding_attention", "linear_attention"

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-odd-heads": ("llama", {}),
    "llama-mqa-biases": ("llama", {**MQA, "attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {**GQA, "head_dim": 22, "tie_word_embeddings": True}),
    "llama-theta": ("llama", {**GQA, "rope_theta": 500000.0, "hidden_act": "gelu"}),
    "llama-relu2": ("llama", {**GQA, "hidden_act": "relu2"}),
    "llama-llama3": ("llama", {**GQA, "rope_scaling": LLAMA3, "rope_theta": 500000.0, "head_dim": 32}),
    "llama-linear": ("llama", {**GQA, "rope_scaling": LINEAR}),
    "llama-dynamic-short": ("llama", {**GQA, "rope_scaling": DYNAMIC}),
    "llama-dynamic-beyond": ("llama", {**GQA, "rope_scaling": DYNAMIC, "max_position_embeddings": 40}),
    "llama-yarn": ("llama", {**GQA, "rope_scaling": YARN, "head_dim": 32}),
    "llama-yarn-no-truncate": (
        "llama",
        {**GQA, "rope_scaling": {**YARN, "truncate": False, "beta_fast": 16, "beta_slow": 2}, "head_dim": 32},
    ),
    "llama-yarn-mscale": ("llama", {**GQA, "rope_scaling": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5}, "head_dim": 32}),
    "llama-yarn-factor": ("llama", {**GQA, "rope_scaling": {**YARN, "attention_factor": 1.3}, "head_dim": 32}),
    "llama-yarn-no-original": ("llama", {**GQA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 64}),
    "llama-longrope-short": ("llama", {**GQA, "rope_scaling": longrope(5, original_max_position_embeddings=128, factor=4.0)}),
    "llama-longrope-long": ("llama", {**GQA, "rope_scaling": longrope(5, original_max_position_embeddings=64, factor=4.0)}),
    "llama-longrope-edge": ("llama", {**GQA, "rope_scaling": longrope(5, original_max_position_embeddings=100)}),
    "llama-proportional": ("llama", {**GQA, "head_dim": 16, "rope_scaling": {"rope_type": "proportional", "factor": 2.0}}),
    "mistral-window": ("mistral", {**GQA, "sliding_window": 9}),
    "mistral-default-window": ("mistral", {**GQA, "head_dim": 14}),
    "mistral-no-window": ("mistral", {**MQA, "sliding_window": None, "rope_theta": 1e6, "tie_word_embeddings": True}),
    "mistral-window-of-one": ("mistral", {**GQA, "sliding_window": 1}),
    "mixtral": ("mixtral", {**GQA, "num_local_experts": 5, "num_experts_per_tok": 3}),
    "mixtral-window-all-experts": (
        "mixtral",
        {**MQA, "num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 17, "head_dim": 12},
    ),
    "mixtral-one-expert": ("mixtral", {**GQA, "num_local_experts": 4, "num_experts_per_tok": 1, "rope_theta": 1e4}),
    "qwen2": ("qwen2", {**GQA, "tie_word_embeddings": True}),
    "qwen2-windows": ("qwen2", {**MQA, "use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}),
    "qwen2-window-not-used": ("qwen2", {**GQA, "use_sliding_window": False, "sliding_window": 11, "max_window_layers": 0}),
    "qwen2-layer-types": ("qwen2", {**GQA, "use_sliding_window": True, "sliding_window": 13, "layer_types": [SLIDING, FULL, SLIDING]}),
    "qwen2-yarn": ("qwen2", {**GQA, "rope_scaling": YARN, "rope_theta": 1e6}),
    "qwen3-biases": ("qwen3", {**GQA, "head_dim": 18, "attention_bias": True}),
    "qwen3-mqa-windows": ("qwen3", {**MQA, "head_dim": 20, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}),
    "qwen3-dynamic": ("qwen3", {**GQA, "head_dim": 12, "rope_scaling": DYNAMIC, "max_position_embeddings": 64}),
    "qwen3_moe": ("qwen3_moe", {**GQA, **moe(7, 3, norm_topk_prob=True), "head_dim": 14}),
    "qwen3_moe-not-normed": ("qwen3_moe", {**MQA, **moe(5, 2), "head_dim": 14, "attention_bias": True}),
    "qwen3_moe-sparse-step": ("qwen3_moe", {**GQA, **moe(4, 4, decoder_sparse_step=2), "num_hidden_layers": 4, "mlp_only_layers": [3]}),
    "qwen3_moe-window": ("qwen3_moe", {**GQA, **moe(4, 2), "use_sliding_window": True, "sliding_window": 15}),
    "gemma2": ("gemma2", {**GQA, "head_dim": 14, "query_pre_attn_scalar": 20, "sliding_window": 16, "num_hidden_layers": 4}),
    "gemma2-no-caps": (
        "gemma2",
        {
            **MQA,
            "head_dim": 10,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "sliding_window": 30,
            "attention_bias": True,
        },
    ),
    "gemma2-strong-caps": ("gemma2", {**GQA, "head_dim": 12, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}),
    "gemma2-layer-types": ("gemma2", {**GQA, "head_dim": 12, "layer_types": [FULL, SLIDING, SLIDING], "sliding_window": 7}),
    "gemma3": ("gemma3_text", {**MQA, "head_dim": 20, "query_pre_attn_scalar": 30, "sliding_window": 12, "num_hidden_layers": 7}),
    "gemma3-ropes": (
        "gemma3_text",
        {
            **GQA,
            "head_dim": 16,
            "layer_types": [SLIDING, FULL, SLIDING],
            "sliding_window": 25,
            "final_logit_softcapping": 5.0,
            "attention_bias": True,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                SLIDING: {"rope_type": "default", "rope_theta": 12345.0},
            },
        },
    ),
    "gemma3-yarn-and-llama3": (
        "gemma3_text",
        {
            **GQA,
            "head_dim": 24,
            "layer_types": [SLIDING, FULL, FULL],
            "sliding_window": 40,
            "rope_parameters": {FULL: YARN, SLIDING: LLAMA3},
        },
    ),
    "gemma3-untied": ("gemma3_text", {**GQA, "head_dim": 16, "tie_word_embeddings": False, "sliding_window": 100}),
    "gemma4-one-width": (
        "gemma4_text",
        {**GQA, "head_dim": 16, "global_head_dim": 16, "sliding_window": 12, "vocab_size_per_layer_input": VOCAB},
    ),
    "phi3": ("phi3", {**GQA}),
    "phi3-window": ("phi3", {**MQA, "sliding_window": 21, "rope_theta": 250000.0, "tie_word_embeddings": True}),
    "phi3-partial": ("phi3", {**GQA, "hidden_size": 96, "partial_rotary_factor": 0.75}),
    "phi3-longrope-short": (
        "phi3",
        {**GQA, "hidden_size": 96, "original_max_position_embeddings": 128, "rope_scaling": {**longrope(8), "type": "longrope"}},
    ),
    "phi3-longrope-long": ("phi3", {**GQA, "hidden_size": 96, "original_max_position_embeddings": 48, "rope_scaling": longrope(8)}),
    "phi3-longrope-partial": (
        "phi3",
        {**GQA, "hidden_size": 96, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 48, "rope_scaling": longrope(6)},
    ),
    "granite": (
        "granite",
        {**GQA, "embedding_multiplier": 12.0, "attention_multiplier": 0.0625, "residual_multiplier": 0.22, "logits_scaling": 8.0},
    ),
    "granite-defaults": ("granite", {**MQA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "olmo2": ("olmo2", {**GQA, "attention_bias": True}),
    "olmo2-mqa-yarn": ("olmo2", {**MQA, "rope_scaling": YARN, "rope_theta": 500000.0}),
    "smollm3": ("smollm3", {**GQA, "num_hidden_layers": 5}),
    "smollm3-pattern": ("smollm3", {**MQA, "no_rope_layers": [0, 1, 0], "attention_bias": True, "mlp_bias": True}),
    "smollm3-windows": (
        "smollm3",
        {**GQA, "use_sliding_window": True, "sliding_window": 14, "no_rope_layer_interval": 2, "num_hidden_layers": 4},
    ),
    "smollm3-untied-yarn": ("smollm3", {**GQA, "tie_word_embeddings": False, "rope_scaling": YARN, "rope_theta": 5e6}),
    "gpt_oss": ("gpt_oss", {**GQA, "head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 10}),
    "gpt_oss-clamped": (
        "gpt_oss",
        {
            **MQA,
            "head_dim": 12,
            "num_local_experts": 3,
            "num_experts_per_tok": 3,
            "swiglu_limit": 0.05,
            "swiglu_alpha": 1.1,
            "sliding_window": 33,
        },
    ),
    "gpt_oss-yarn": (
        "gpt_oss",
        {
            **GQA,
            "head_dim": 24,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "layer_types": [FULL, FULL, SLIDING],
            "attention_bias": False,
            "rope_parameters": {**YARN, "truncate": False, "rope_theta": 150000.0},
        },
    ),
    "qwen3_next": ("qwen3_next", delta((2, 4), (8, 12), **moe(4, 2), shared_expert_intermediate_size=20, num_hidden_layers=5)),
    "qwen3_next-equal-heads": (
        "qwen3_next",
        delta(
            (3, 3),
            (16, 8),
            **moe(3, 3, norm_topk_prob=False),
            shared_expert_intermediate_size=36,
            layer_types=[FULL, RECURRENT, FULL],
            mlp_only_layers=[1],
            attention_bias=True,
            linear_conv_kernel_dim=3,
        ),
    ),
    "qwen3_next-sparse-step": (
        "qwen3_next",
        delta((1, 6), (24, 10), **moe(6, 1, decoder_sparse_step=2), shared_expert_intermediate_size=8, partial_rotary_factor=0.5),
    ),
    "qwen3_5": ("qwen3_5_text", delta((2, 6), (10, 14), num_hidden_layers=6, tie_word_embeddings=True)),
    "qwen3_5-ropes": (
        "qwen3_5_text",
        delta(
            (4, 4),
            (8, 8),
            layer_types=[RECURRENT, FULL, FULL],
            head_dim=24,
            linear_conv_kernel_dim=2,
            attention_bias=True,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 2, 2],
                "mrope_interleaved": True,
            },
        ),
    ),
    "qwen3_5-only-recurrent": ("qwen3_5_text", delta((2, 2), (16, 16), layer_types=[RECURRENT] * 3)),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model_type, settings = CASES[case]
    reference = transformers_logits(write_with_transformers(tmp_path, model_type, len(case), **{**BASE, **settings}), TOKENS)
    model = open_model(tmp_path)
    whole = logits_of(model, TOKENS)
    assert np.abs(whole - reference).max() < LIMIT
    assert np.abs(logits_of(model, TOKENS, [40, 1, 59]) - whole).max() < 1e-4
