"""Stored logits of transformers for tiny models of mlx-lm's graphs, whose tensors are made from their names."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parents[2] / "golden" / "fallback"

FULL, SLIDING = "full_attention", "sliding_attention"
KINDS: dict[str, dict[str, Any]] = {
    "exaone_moe": {"layer_types": [SLIDING, FULL]},
    "gpt2": {"n_embd": 32, "n_layer": 2},
    "internlm3": {"head_dim": 8},
    "mamba2": {"num_heads": 4},
    "olmo_hybrid": {"layer_types": ["linear_attention", FULL]},
}
"""By `model_type`: settings that the smaller size needs."""


def made_tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 numbers that depend on the name alone."""
    noise = np.random.default_rng(zlib.crc32(name.encode())).normal(0, 0.12, shape)
    is_norm = len(shape) == 1 and name.endswith("weight")
    return (noise + is_norm).astype(np.float32)


def golden(kind: str) -> tuple[dict[str, Any], dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Config, tensors, tokens `[60]`, logits `[60, vocab]`."""
    with np.load(GOLDEN / f"{kind}.npz") as held:
        shapes = json.loads(str(held["tensors"]))
        tensors = {name: made_tensor(name, tuple(shape)) for name, shape in shapes.items()}
        return json.loads(str(held["config"])), tensors, held["ids"], held["logits"]
