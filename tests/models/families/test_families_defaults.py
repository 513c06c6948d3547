"""Values that configs and checkpoints leave out follow from the others. tests/families compares every golden checkpoint with
transformers."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.models.families import GOLDEN, LIMIT, config, reference
from support.models.plain_weights import PlainWeights
from support.models.tiny import logits_of, open_model
from support.oracles.plain_step import PlainCache

from mlxinfer.models import build
from mlxinfer.models.decoder import Model


def error(model: Model, name: str) -> float:
    tokens, expected = reference(name)
    return float(np.abs(logits_of(model, tokens) - expected).max())


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("qwen3_next", {"layer_types": None, "full_attention_interval": 3}),
        ("qwen3_5_text", {"layer_types": None, "full_attention_interval": 3}),
        ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 3}),
        ("gemma2", {"layer_types": None}),
        ("gpt_oss", {"layer_types": None, "experts_per_token": 2, "initial_context_length": 4096}),
        ("qwen3_moe", {"num_local_experts": None, "num_experts": 6, "max_window_layers": 3}),
        ("smollm3", {"no_rope_layers": None, "layer_types": None, "max_window_layers": 28}),
        ("qwen2", {"layer_types": None}),
    ],
)
def test_what_older_configs_leave_out_follows_from_the_rest(name: str, missing: dict[str, Any]) -> None:
    changed = {key: value for key, value in (config(name) | missing).items() if value is not None or key not in missing}
    assert error(build(changed, PlainWeights.open(GOLDEN / name / "model.safetensors")), name) < LIMIT


@pytest.mark.smoke
def test_a_head_of_its_own_is_used_even_if_the_config_ties_it() -> None:
    assert error(open_model(GOLDEN / "llama", tie_word_embeddings=True), "llama") < LIMIT


def test_a_checkpoint_without_a_head_is_tied_whatever_the_config_says() -> None:
    assert error(open_model(GOLDEN / "llama3_rope", tie_word_embeddings=False), "llama3_rope") < LIMIT


def test_precomputed_logits_need_every_row_only_once() -> None:
    model, (tokens, expected) = open_model(GOLDEN / "granite"), reference("granite")
    hidden = model.hidden(mx.array(tokens, mx.int32), PlainCache(model.layers).step([(0, len(tokens))]))
    last = model.logits(hidden[-1:])
    assert last.dtype == mx.float32
    assert np.abs(np.array(last) - expected[-1:]).max() < LIMIT
