"""A tiny Llama with as many heads and layers as several machines can share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxinfer.models import build
from mlxinfer.nn.weights import Dense

from ..engines.tiny_engine import GOLDEN
from .plain_weights import RandomWeights


def wide_directory(target: Path, family: str = "llama", **changes: Any) -> Path:
    """Random weights, eight heads of queries and four of keys, five layers; of another family if given."""
    target.mkdir(parents=True)
    config = json.loads((GOLDEN / family / "config.json").read_text(encoding="utf-8"))
    sizes = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 80,
        "num_hidden_layers": 5,
        "tie_word_embeddings": True,
    }
    config |= sizes | changes
    weights = RandomWeights(tied=True)
    build(config, weights)
    tensors = {name: matrix.weight for name, matrix in weights.asked.items() if isinstance(matrix, Dense)}
    mx.save_safetensors(str(target / "model.safetensors"), tensors)
    (target / "config.json").write_text(json.dumps(config))
    return target
