"""Architectures that run on mlx-lm's graphs, from checkpoints of transformers 5, must give its logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.plain_step import PlainCache
from support.tiny import VOCAB, random_tokens, transformers_logits, write_with_transformers

from mlxinfer.models import mlx_lm_fallback as zoo
from mlxinfer.models import supports

pytestmark = pytest.mark.torch

LIMIT = 2e-3
TOKENS = random_tokens(100)
FULL, SLIDING = "full_attention", "sliding_attention"

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK_MOE = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

CASES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "cohere": {},
    "dots1": {**DEEPSEEK_MOE, "head_dim": 16},
    "gemma": {"head_dim": 16},
    "gpt_neox": {"intermediate_size": 256},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "helium": {"head_dim": 16},
    "mamba": {"state_size": 8, "num_hidden_layers": 2},
    "nemotron": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phi": {},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 1},
    "stablelm": {},
    "starcoder2": {},
}


@pytest.mark.parametrize("model_type", CASES)
def test_logits_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    assert not supports(model_type)
    reference = transformers_logits(write_with_transformers(tmp_path, model_type, 3, **{**BASE, **CASES[model_type]}), TOKENS)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    model = zoo.build(config, mx.load(str(tmp_path / "model.safetensors")))
    cache, rows, start = PlainCache(model.layers), [], 0
    for count in (40, 1, 59):
        step = cache.step([(0, count)])
        rows.append(model.logits(model.hidden(mx.array(TOKENS[start : start + count], mx.int32), step)))
        start += count
    assert np.abs(np.array(mx.concatenate(rows)) - reference).max() < LIMIT
