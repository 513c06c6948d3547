"""Ropes of mlx-lm's graphs: both spellings of a config mean the same, and no base is taken that the config does not name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.fallback.golden import golden
from support.oracles.plain_step import PlainCache

from mlxinfer.errors import UnsupportedModelError
from mlxinfer.models.fallback import mlx_lm as zoo
from mlxinfer.models.fallback.ropes import DEFAULTS, check_bases, with_both_spellings

Config = dict[str, Any]

GLM: Config = {
    "model_type": "glm_moe_dsa",
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_size": 32,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 8,
    "intermediate_size": 32,
    "kv_lora_rank": 8,
    "max_position_embeddings": 256,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 2,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "v_head_dim": 8,
    "vocab_size": 32,
}
LLAMA: Config = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "vocab_size": 32,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "type": "yarn", "rope_type": "yarn"}


def made(config: Config, module: str) -> dict[str, mx.array]:
    """Random tensors under the names of mlx-lm's graph of a config that its class reads as it is."""
    graph: Any = import_module(f"mlx_lm.models.{module}")
    mx.random.seed(2)
    parameters = tree_flatten(graph.Model(graph.ModelArgs.from_dict(config)).parameters())
    return {name: mx.random.normal(array.shape) * 0.1 for name, array in parameters}


def logits(config: Config, tensors: dict[str, Any]) -> np.ndarray:
    model = zoo.build(config, {name: mx.array(tensor) for name, tensor in tensors.items()})
    cache = PlainCache(model.layers)
    return np.array(model.logits(model.hidden(mx.arange(24) % 32, cache.step([(0, 24)]))))


@pytest.mark.parametrize("scaling", [None, YARN])
def test_old_and_new_spelling_of_glm_give_the_same_logits(scaling: Config | None) -> None:
    new = GLM | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default", **(scaling or {})}}
    old = GLM | {"rope_theta": 5e5, "rope_scaling": scaling}
    half = GLM | {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", **(scaling or {})}}
    tensors = made(new | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}, "glm_moe_dsa")
    expected = logits(new, tensors)
    assert np.array_equal(logits(old, tensors), expected)
    assert np.array_equal(logits(half, tensors), expected)
    assert not np.array_equal(logits(old | {"rope_theta": 1e4}, tensors), expected)


@pytest.mark.parametrize("kind", ["exaone_moe", "internlm3", "olmo_hybrid"])
def test_spellings_of_stored_models(kind: str) -> None:
    config, tensors, tokens, expected = golden(kind)
    parameters = config.pop("rope_parameters")
    theta = parameters.pop("rope_theta")
    for spelled in ({"rope_theta": theta}, {"rope_theta": theta, "rope_parameters": parameters}):
        model = zoo.build(config | spelled, {name: mx.array(tensor) for name, tensor in tensors.items()})
        cache = PlainCache(model.layers)
        row = mx.array(tokens.astype(np.int32))
        found = np.array(model.logits(model.hidden(row, cache.step([(0, len(tokens))]))))
        assert np.abs(found - expected).max() < 2e-4, spelled


def refused(config: Config, module: str, match: str, change: Callable[[Config], Config]) -> None:
    tensors = made(config, module)
    logits(config, tensors)
    with pytest.raises(UnsupportedModelError, match=match):
        logits(change(config), tensors)


def test_a_base_that_the_graph_does_not_read_is_refused() -> None:
    config = {"model_type": "gptj", "n_embd": 32, "n_head": 2, "n_layer": 1, "n_positions": 64, "rotary_dim": 8, "vocab_size": 32}
    config |= {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": False}
    refused(config, "gptj", "with the base 10000, where config.json says 5000", lambda given: given | {"rope_theta": 5000.0})


def test_a_base_that_nobody_names_is_refused() -> None:
    def nameless(given: Config) -> Config:
        return {key: value for key, value in given.items() if key != "rope_theta"}

    config = LLAMA | {"model_type": "mimo", "rope_theta": 1e6, "num_nextn_predict_layers": 1}
    refused(config, "mimo", "names no rope_theta.*would take 10000.*add rope_theta", nameless)


def test_a_base_that_the_models_own_code_takes_unless_told_is_given() -> None:
    config = LLAMA | {"model_type": "minicpm", "tie_word_embeddings": False, "dim_model_base": 16, "scale_depth": 1.4, "scale_emb": 12.0}
    tensors = made(config, "minicpm")
    assert np.array_equal(logits(config, tensors), logits(config | {"rope_theta": 1e4}, tensors))
    assert not np.array_equal(logits(config, tensors), logits(config | {"rope_theta": 1e6}, tensors))


def test_a_base_that_transformers_takes_unless_told_is_given() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "rms_norm_eps"} | {"model_type": "starcoder2", "norm_epsilon": 1e-5}
    tensors = made(config, "starcoder2")
    assert np.array_equal(logits(config, tensors), logits(config | {"rope_theta": 1e4}, tensors))
    assert not np.array_equal(logits(config, tensors), logits(config | {"rope_theta": 1e5}, tensors))


@pytest.mark.parametrize("name", ["laguna", "mellum", "spark2_5"])
def test_one_base_for_a_graph_that_reads_one_for_each_kind_is_refused(name: str) -> None:
    config = {"layer_types": ["full_attention", "sliding_attention"], "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    with pytest.raises(UnsupportedModelError, match=f"{name} reads a rope_theta in rope_parameters for each of full_attention, sliding"):
        check_bases(None, config, name, dict)


def test_the_old_names_of_a_windows_base() -> None:
    both = with_both_spellings({"model_type": "mimo_v2_flash", "rope_theta": 5e6, "rope_local_base_freq": 1e4})
    assert both["swa_rope_theta"] == 1e4


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_defaults_are_those_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    ropes = transformers.CONFIG_MAPPING[name]().rope_parameters
    if "full_attention" in ropes:
        assert ropes["sliding_attention"]["rope_theta"] == DEFAULTS[name]["rope_local_base_freq"]
        ropes = ropes["full_attention"]
    assert ropes["rope_theta"] == DEFAULTS[name]["rope_theta"]
    assert ropes.get("partial_rotary_factor", 1.0) in (DEFAULTS[name].get("partial_rotary_factor", 1.0), 0.5 if name in HALVES else None)


HALVES = ("nemotron", "recurrent_gemma")
"""Architectures whose graphs in mlx-lm rotate half of the channels unless told."""
