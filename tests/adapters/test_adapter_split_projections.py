"""Projections that GGUF files have in parts: what the parts' updates add is what they add to the joined matrix."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.formats.gguf_file import Tensor, Typed, array_tensor, write

from mlxinfer.adapters.files import open_adapter

CONFIG = {
    "model_type": "qwen3_next", "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 3, "linear_value_head_dim": 5,
    "full_attention_interval": 4,
}  # fmt: skip
KEYS, VALUES, INTO = 2 * 3, 4 * 5, 8


def adapter(path: Path, tensors: list[Tensor]) -> Path:
    head = {"general.type": "adapter", "general.architecture": "qwen3next", "adapter.type": "lora", "adapter.lora.alpha": Typed("f32", 4.0)}
    return write(path, head, tensors)


def factors(stem: str, out: int, rank: int = 2) -> tuple[np.ndarray, list[Tensor]]:
    """The product, and both tensors."""
    rng = np.random.default_rng(out)
    a, b = rng.normal(size=(rank, INTO)).astype(np.float32), rng.normal(size=(out, rank)).astype(np.float32)
    return b @ a, [array_tensor(f"blk.0.{stem}.weight.lora_a", a), array_tensor(f"blk.0.{stem}.weight.lora_b", b)]


def test_two_tensors_of_one_projection(tmp_path):
    """Queries, keys and values in one, the gate in another; the joined matrix has them head by head."""
    (qkv, first), (gate, second) = factors("attn_qkv", 2 * KEYS + VALUES), factors("attn_gate", VALUES)
    opened = open_adapter("it", adapter(tmp_path / "a.gguf", [*first, *second]), CONFIG)
    ((key, update),) = opened.updates.items()
    found = update.read()
    parts = np.split(np.concatenate([qkv, gate]), [KEYS, 2 * KEYS, 2 * KEYS + VALUES])
    expected = np.concatenate([part.reshape(2, -1, INTO) for part in parts], axis=1).reshape(-1, INTO)
    assert (key, update.shape, update.rank, update.scale) == ("layers.0.linear_attn.in_proj_qkvz", expected.shape, 4, 2.0)
    np.testing.assert_allclose(np.array(found.b) @ np.array(found.a), expected, atol=1e-6)
    opened.close()


@pytest.mark.parametrize("rank", [2, 3])
def test_one_of_them_alone_or_of_another_rank_fits_no_projection(tmp_path, rank):
    """So that loading it is refused: an update has to have the shape of its projection's matrix."""
    (_, first), (_, second) = factors("attn_qkv", 2 * KEYS + VALUES), factors("attn_gate", VALUES, rank)
    opened = open_adapter("it", adapter(tmp_path / "a.gguf", first if rank == 2 else [*first, *second]), CONFIG)
    ((key, update),) = opened.updates.items()
    assert update.shape != (2 * KEYS + 2 * VALUES, INTO)
    assert update.tensor == "blk.0.attn_qkv.weight.lora_a"
    assert key in ("blk.0.attn_qkv", "layers.0.linear_attn.in_proj_qkvz")
    opened.close()
