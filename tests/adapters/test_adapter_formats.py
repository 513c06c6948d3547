"""Every file format changes a model like the same update merged into its weights, in float32."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.models.adapters import Changes, merge, random_changes, shapes_of, write_gguf_adapter, write_mlx_lm, write_peft
from support.models.tiny_directory import tiny_directory

from mlxinfer import LLM

IDS = list(range(3, 60))
CLOSE = 5e-4
"""Tolerance of logits in float32 without the CPU kernels. A misplaced update changes them by far more (`test_peft`)."""


def logits(model: Path, adapter: Path | None = None, **settings: object) -> np.ndarray:
    with LLM(model, dtype="float32", memory_gb=2, adapters=None if adapter is None else {"it": adapter}, **settings) as llm:
        return np.array(llm.logits(IDS, adapter=None if adapter is None else "it"))


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("base") / "llama")


def merged(tmp_path: Path, changes: Changes, architecture: str = "llama") -> np.ndarray:
    return logits(merge(tiny_directory(tmp_path / "merged", architecture), changes))


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("rslora", [False, True])
def test_peft(base, tmp_path, dora, rslora):
    changes = random_changes(shapes_of(base), dora=dora, rslora=rslora)
    written = write_peft(tmp_path / "adapter", changes, use_rslora=rslora)
    expected, without = merged(tmp_path, changes), logits(base)
    assert np.abs(expected - without).max() > 0.5
    assert np.abs(logits(base, written) - expected).max() < CLOSE


def test_peft_patterns(base, tmp_path):
    shapes, ranks = shapes_of(base), {"q_proj": 2, "down_proj": 7}
    changes = random_changes(shapes, ranks=ranks)
    changes = {name: (change if "v_proj" not in name else type(change)(change.a, change.b, 20 / 4)) for name, change in changes.items()}
    written = write_peft(tmp_path / "adapter", changes, rank_pattern={"q_proj": 2, r".*mlp\.down_proj": 7}, alpha_pattern={"v_proj": 20})
    assert np.abs(logits(base, written) - merged(tmp_path, changes)).max() < CLOSE


def test_peft_in_one_layer_with_an_expression_for_targets(base, tmp_path):
    changes = random_changes(shapes_of(base), layers=[1], projections=["q_proj", "down_proj"])
    written = write_peft(tmp_path / "adapter", changes, layers_to_transform=[1], target_modules=r".*\.(q_proj|down_proj)")
    assert np.abs(logits(base, written) - merged(tmp_path, changes)).max() < CLOSE


@pytest.mark.parametrize("dora", [False, True])
def test_mlx_lm(base, tmp_path, dora):
    changes = random_changes(shapes_of(base), dora=dora)
    written = write_mlx_lm(tmp_path / "adapter", changes)
    assert np.abs(logits(base, written) - merged(tmp_path, changes)).max() < CLOSE


def test_gguf_over_safetensors(base, tmp_path):
    config = json.loads((base / "config.json").read_text())
    changes = random_changes(shapes_of(base))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    written = write_gguf_adapter(tmp_path / "adapter.gguf", changes, heads=heads, kv_heads=kv_heads)
    assert np.abs(logits(base, written) - merged(tmp_path, changes)).max() < CLOSE


@pytest.mark.parametrize("alpha", [0.0, 3.0])
def test_gguf_scale(base, tmp_path, alpha):
    changes = random_changes(shapes_of(base), projections=["o_proj", "up_proj"], alpha=alpha or 4.0)
    written = write_gguf_adapter(tmp_path / "adapter.gguf", changes, alpha=alpha)
    assert np.abs(logits(base, written) - merged(tmp_path, changes)).max() < CLOSE
