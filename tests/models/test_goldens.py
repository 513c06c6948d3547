"""Every golden checkpoint gives transformers' logits: whole, in chunks, beside another sequence, and from its other layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.plain_step import PlainCache
from support.plain_weights import PlainWeights
from support.tiny import logits_of, open_model

from mlxinfer.models import build
from mlxinfer.models.decoder import Model

GOLDEN = Path(__file__).parents[1] / "golden" / "arch"
NAMES = sorted(folder.name for folder in GOLDEN.iterdir())
LIMIT = 2e-3


def reference(name: str) -> tuple[list[int], np.ndarray]:
    data = np.load(GOLDEN / name / "reference.npz")
    return [int(token) for token in data["ids"]], data["logits"]


def config(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8"))
    return read


def error(model: Model, name: str, chunks: list[int] | None = None) -> float:
    tokens, expected = reference(name)
    return float(np.abs(logits_of(model, tokens, chunks) - expected).max())


@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str) -> None:
    assert error(open_model(GOLDEN / name), name) < LIMIT


@pytest.mark.parametrize("name", NAMES)
def test_chunks_change_nothing(name: str) -> None:
    assert error(open_model(GOLDEN / name), name, [7, 1, 30, 1, 41]) < LIMIT


@pytest.mark.parametrize("name", NAMES)
def test_two_sequences_in_one_row_do_not_see_each_other(name: str) -> None:
    model, (tokens, expected) = open_model(GOLDEN / name), reference(name)
    cache, totals = PlainCache(model.layers), {0: len(tokens), 1: len(tokens)}
    rows: dict[int, list[np.ndarray]] = {0: [], 1: []}
    done = {0: 0, 1: 0}
    for parts in ([(0, 20), (1, 3)], [(1, 40), (0, 1)], [(0, 1), (1, 1)], [(0, 58), (1, 36)]):
        flat = [token for slot, count in parts for token in tokens[done[slot] : done[slot] + count]]
        logits = np.array(model.logits(model.hidden(mx.array(flat, mx.int32), cache.step(parts, totals))))
        for (slot, count), part in zip(parts, np.split(logits, [parts[0][1]]), strict=True):
            rows[slot].append(part)
            done[slot] += count
    assert np.abs(np.concatenate(rows[0]) - expected).max() < LIMIT
    assert np.abs(np.concatenate(rows[1]) - expected).max() < LIMIT


@pytest.mark.parametrize("name", NAMES)
def test_what_was_asked_for_is_a_checkpoint_of_its_own(name: str) -> None:
    weights = PlainWeights.open(GOLDEN / name / "model.safetensors")
    build(config(name), weights)
    again = PlainWeights(weights.asked)
    model = build(config(name), again)
    assert again.used == set(weights.asked)
    assert error(model, name) < LIMIT


def old_keys(name: str) -> dict[str, Any]:
    """The config as transformers wrote it before version 5, by hand."""
    old = config(name)
    rope = old.pop("rope_parameters")
    old["torch_dtype"] = old.pop("dtype")
    if "full_attention" in rope:
        old["rope_theta"], old["rope_local_base_freq"] = rope["full_attention"]["rope_theta"], rope["sliding_attention"]["rope_theta"]
        rope = {}
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            old[key] = rope.pop(key)
    if rope.get("rope_type", "default") != "default":
        old["rope_scaling"] = {("type" if key == "rope_type" and name != "llama3_rope" else key): value for key, value in rope.items()}
    return old


@pytest.mark.parametrize("name", NAMES)
def test_the_old_style_of_the_config_means_the_same(name: str) -> None:
    model = build(old_keys(name), PlainWeights.open(GOLDEN / name / "model.safetensors"))
    assert error(model, name) < LIMIT


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
