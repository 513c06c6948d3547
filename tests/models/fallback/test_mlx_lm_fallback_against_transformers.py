"""Architectures that run on mlx-lm's graphs, from checkpoints of transformers 5, must give its logits or be refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.fallback.written import variants, written
from support.models.tiny import random_tokens
from support.oracles.plain_step import PlainCache

from mlxinfer.errors import UnsupportedModelError, WeightsError
from mlxinfer.models import supports
from mlxinfer.models.fallback import mlx_lm as zoo
from mlxinfer.models.fallback.checks import check_of
from mlxinfer.models.fallback.hf_compat import to_old_style

pytestmark = pytest.mark.torch

LIMIT = 2e-3
TOKENS = random_tokens(100)
CHUNKS = ((100,), (40, 1, 59))

QUICK = ["apertus", "cohere", "dots1", "gemma", "gpt_neox", "granitemoe", "helium", "mamba", "nemotron", "olmoe", "phi", "qwen2_moe"]
QUICK += ["stablelm", "starcoder2"]
REFUSED = {
    ("gemma3n_text", 0): "neither here nor by the installed mlx-lm",
    ("glm", 0): "rotates all channels",
    ("gpt2", 1): "scale_attn_by_inverse_layer_idx",
    ("olmoe", 2): "clip_qkv",
    ("solar_open", 1): "rope scaling is yarn",
    ("qwen2_moe", 1): "norm_topk_prob",
    ("gpt_bigcode", 1): "multi_query",
    ("llama4_text", 1): "is missing",
    ("mamba2", 1): "n_groups is 2",
    ("minimax", 0): "MiniMax-M2",
    ("minimax", 1): "MiniMax-M2",
    ("mimo_v2_flash", 0): "cannot represent",
    ("bailing_hybrid", 0): "cannot read this config",
    ("bitnet", 0): "is missing",
    ("nanochat", 0): "is missing",
    ("nanochat", 1): "is missing",
}
"""Models that are not loaded, and what the error says."""
ON_APPLE_GPUS = ("muse_spark", 0)


def _parameters() -> list[object]:
    listed = [variant for variant in variants() if not supports(variant[0]) and variant != ON_APPLE_GPUS]
    return [pytest.param(*v, marks=() if v[0] in QUICK and v[1] == 0 else pytest.mark.slow) for v in listed]


@pytest.mark.parametrize(("kind", "number"), _parameters())
def test_logits_are_those_of_transformers(kind: str, number: int, tmp_path: Path) -> None:
    config, tensors, reference = written(tmp_path, kind, number, TOKENS)
    if (kind, number) in REFUSED:
        with pytest.raises((UnsupportedModelError, WeightsError), match=REFUSED[kind, number]):
            zoo.build(config, tensors)
        return
    model = zoo.build(config, tensors)
    known = check_of(kind).error
    assert known is not None
    seen = min(100, model.max_context)
    for chunks in CHUNKS:
        cache, rows, start = PlainCache(model.layers), [], 0
        for count in chunks:
            row = mx.array(TOKENS[start : start + count], mx.int32)
            rows.append(model.logits(model.hidden(row, cache.step([(0, count)]))))
            start += count
        difference = np.abs(np.array(mx.concatenate(rows)) - reference)[:seen].max()
        assert difference < min(LIMIT, 10 * known), f"{difference:.2g}, known: {known:.0e}"


@pytest.mark.parametrize(("kind", "number"), _parameters())
def test_both_spellings_of_a_rope_give_the_same_logits(kind: str, number: int, tmp_path: Path) -> None:
    if (kind, number) in REFUSED or kind in BY_KIND:
        pytest.skip("such a model is not loaded, or its rope has one spelling only")
    config, tensors, _ = written(tmp_path, kind, number, TOKENS)
    spelled = [_first_logits(spelling, tensors) for spelling in (config, _old_spelling(config))]
    assert np.array_equal(*spelled)


BY_KIND = ("laguna", "mellum")
"""Architectures whose graphs in mlx-lm read `rope_parameters` for each kind of layer only."""


def _old_spelling(config: dict[str, Any]) -> dict[str, Any]:
    old = {key: value for key, value in to_old_style(config).items() if key != "rope_parameters"} | {"model_type": config["model_type"]}
    if isinstance(old.get("text_config"), dict):
        old["text_config"] = {key: value for key, value in old["text_config"].items() if key != "rope_parameters"}
    return old


def _first_logits(config: dict[str, Any], tensors: dict[str, mx.array]) -> np.ndarray:
    model = zoo.build(config, dict(tensors))
    row = mx.array(TOKENS[:20], mx.int32)
    return np.array(model.logits(model.hidden(row, PlainCache(model.layers).step([(0, 20)]))))
