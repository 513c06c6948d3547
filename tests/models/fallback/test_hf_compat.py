"""Configs of transformers 5 in the style that mlx-lm reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxinfer.models import FAMILIES, architecture
from mlxinfer.models.fallback.hf_compat import lost_in_old_style, to_old_style

GOLDEN = Path(__file__).parents[2] / "golden" / "arch"
NAMES = sorted(folder.name for folder in GOLDEN.iterdir())


def config(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8"))
    return read


def assert_same_architecture(one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = architecture(one), architecture(other)
    assert (first.sizes, first.specs) == (second.sizes, second.specs)
    for key, rope in first.ropes.items():
        for length in (10, 40):
            np.testing.assert_allclose(second.ropes[key].frequencies(length), rope.frequencies(length))
        assert second.ropes[key].gain == rope.gain


@pytest.mark.parametrize("name", NAMES)
def test_the_translation_means_the_same(name: str) -> None:
    original = config(name)
    old = to_old_style(original)
    if old["model_type"] not in FAMILIES:
        old["model_type"] = original["model_type"]
    assert_same_architecture(original, old)
    without = {key: value for key, value in old.items() if key not in ("rope_parameters", "dtype")}
    assert_same_architecture(original, without)


@pytest.mark.parametrize("name", NAMES)
def test_translating_twice_changes_nothing_more(name: str) -> None:
    old = to_old_style(config(name))
    assert to_old_style(old) == old


@pytest.mark.parametrize("name", NAMES)
def test_the_original_is_left_alone(name: str) -> None:
    original = config(name)
    to_old_style(original).setdefault("rope_parameters", {})["rope_theta"] = 5
    assert original == config(name)


def test_old_keys() -> None:
    old = to_old_style(config("llama3_rope"))
    assert old["rope_theta"] == 500000.0
    assert old["rope_scaling"]["rope_type"] == old["rope_scaling"]["type"] == "llama3"
    assert old["torch_dtype"] == "float32"


def test_intervals_stand_for_layer_types() -> None:
    assert to_old_style(config("gemma3_text"))["sliding_window_pattern"] == 3
    assert to_old_style(config("qwen3_next"))["full_attention_interval"] == 3
    assert to_old_style(config("qwen3_next") | {"layer_types": ["full_attention"] * 3})["full_attention_interval"] == 1
    windows_only = config("gemma3_text") | {"layer_types": ["sliding_attention"] * 3}
    assert to_old_style(windows_only)["sliding_window_pattern"] == 4


def test_a_model_that_scales_unless_told_is_told() -> None:
    plain = config("gpt_oss") | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    assert_same_architecture(plain, {key: value for key, value in to_old_style(plain).items() if key != "rope_parameters"})


def test_ropes_by_layer() -> None:
    old = to_old_style(config("gemma3_text"))
    assert (old["rope_theta"], old["rope_local_base_freq"]) == (1000000.0, 10000.0)
    assert old["rope_scaling"] is None
    scaled = config("gemma3_text")
    scaled["rope_parameters"]["full_attention"] = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    assert to_old_style(scaled)["rope_scaling"] == {"factor": 8.0, "rope_type": "linear", "type": "linear"}


@pytest.mark.parametrize(
    ("new", "old"),
    [
        ({"model_type": "gpt2", "n_positions": 128}, {"n_ctx": 128}),
        ({"model_type": "lfm2", "hidden_size": 64}, {"block_dim": 64}),
        ({"model_type": "apertus"}, {"qk_norm": True, "post_norm": False}),
        ({"model_type": "exaone4", "hidden_size": 64, "num_attention_heads": 4}, {"head_dim": 16}),
        (
            {"model_type": "gpt_neox", "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "rope_type": "default"}},
            {"rotary_emb_base": 1e4, "rotary_pct": 0.25},
        ),
    ],
    ids=str,
)
def test_keys_out_of_use_are_added(new: dict[str, Any], old: dict[str, Any]) -> None:
    translated = to_old_style(new)
    assert {key: translated[key] for key in old} == old


@pytest.mark.parametrize("key", ["rope_parameters", "layer_types", "text_config", "dtype"])
def test_nonsense_is_left_to_whoever_reads_it(key: str) -> None:
    for value in (None, 3, "x", [1], {"a": None}):
        to_old_style({"model_type": "llama", key: value})
        lost_in_old_style({"model_type": "llama", key: value})


def test_counts_of_experts_have_both_names() -> None:
    assert to_old_style(config("qwen3_moe"))["num_experts"] == 6


def test_text_models_have_mlx_lms_name() -> None:
    assert to_old_style(config("qwen3_5_text"))["model_type"] == "qwen3_5"


def test_the_text_part_is_translated_as_well() -> None:
    old = to_old_style({"model_type": "gemma3", "text_config": config("gemma3_text")})
    assert old["text_config"]["rope_local_base_freq"] == 10000.0


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_the_goldens_is_lost(name: str) -> None:
    assert lost_in_old_style(config(name)) == []


def test_what_is_lost_is_said() -> None:
    uneven = config("qwen3_next") | {"layer_types": ["linear_attention", "full_attention", "full_attention"]}
    assert lost_in_old_style(uneven) == ["layer_types, which are not periodic"]
    ropes = config("gemma3_text")
    ropes["rope_parameters"]["sliding_attention"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    assert lost_in_old_style({"model_type": "gemma3", "text_config": ropes}) == ["rope_parameters of sliding_attention"]
