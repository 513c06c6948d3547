"""Files of the newer architectures: older forms, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxinfer.errors import CheckpointError, UnsupportedModelError
from mlxinfer.loading.gguf import GGUFCheckpoint
from tests.support.formats.gguf_file import Typed
from tests.support.formats.gguf_golden import Arrays, logits, reference, rewritten


def one_matrix_to_all_heads(arrays: Arrays) -> None:
    for layer in range(2):
        keys, values = (arrays.pop(f"blk.{layer}.attn_{part}_b.weight") for part in "kv")
        arrays[f"blk.{layer}.attn_kv_b.weight"] = np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, keys.shape[1])


def test_latent_attention_in_files_of_before_it_was_absorbed(tmp_path: Path) -> None:
    old = {"attention.key_length_mla": None, "attention.value_length_mla": None, "attention.key_length": 24, "attention.value_length": 24}
    path = rewritten("deepseek2", tmp_path / "old.gguf", old | {"attention.head_count_kv": 4}, one_matrix_to_all_heads)
    ids, expected = reference("deepseek2")
    np.testing.assert_allclose(logits(path, ids), expected, atol=1e-4)


def test_scores_of_experts_that_the_file_does_not_name(tmp_path: Path) -> None:
    """With a bias of the scores they are V3's experts, without one V2's."""
    unnamed = {"expert_gating_func": None}
    for name in ("deepseek2", "glm4_moe_lite"):
        ids, expected = reference(name)
        path = rewritten(name, tmp_path / f"{name}.gguf", unnamed)
        np.testing.assert_allclose(logits(path, ids), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "changes", "error"),
    [
        ("glm4moe", {"expert_gating_func": 1}, "expert_gating_func is 1"),
        ("minimax-m2", {"expert_gating_func": 3}, "expert_gating_func is 3"),
        ("mistral4", {"attention.temperature_scale": 0.3}, "attention.temperature_scale is 0.3"),
        ("gemma4", {"rope.dimension_count_swa": 8}, "rope.dimension_count_swa is not 16"),
        ("gemma4", {"attention.value_length": 16}, "attention.value_length is not 32"),
        ("lfm2", {"attention.sliding_window": 64}, "attention.sliding_window is set"),
        ("nemotron_h", {"attention.head_count_kv": Typed("array", [1, 2, 0], of="i32")}, "differs from layer to layer"),
        ("qwen35moe", {"expert_weights_scale": 2.0}, "expert_weights_scale is 2.0"),
        ("kimi-linear", {"some_new_key": 1}, "some_new_key = 1 is not understood"),
    ],
)
def test_what_changes_the_maths_is_refused_by_name(name: str, changes: dict[str, Any], error: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=error):
        GGUFCheckpoint(rewritten(name, tmp_path / "x.gguf", changes))


@pytest.mark.parametrize(
    ("name", "changes", "error"),
    [
        ("nemotron_h", {"feed_forward_length": 48}, "feed_forward_length must hold a number for each of the 3 layers"),
        ("deepseek3", {"attention.key_length_mla": 8}, "attention.key_length_mla must be above rope.dimension_count, 8"),
        ("granitehybrid", {"attention.head_count_kv": Typed("array", [2], of="i32")}, "must hold a number for each of the 2 layers"),
        ("falcon-h1", {"ssm.inner_size": 63}, "ssm.inner_size is 63, not a multiple of the 4 heads"),
    ],
)
def test_senseless_values_are_named(name: str, changes: dict[str, Any], error: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=error):
        GGUFCheckpoint(rewritten(name, tmp_path / "x.gguf", changes))


def test_matrices_of_one_part_that_cannot_be_joined_stay_apart(tmp_path: Path) -> None:
    """Such tensors keep llama.cpp's names, for the loader to refuse."""
    path = rewritten("granitehybrid_dense", tmp_path / "x.gguf", {}, lambda arrays: arrays.pop("blk.0.ffn_up.weight"))
    checkpoint = GGUFCheckpoint(path)
    assert "blk.0.ffn_gate.weight" in checkpoint.names()
    checkpoint.close()
