"""Random checkpoints of any architecture and size, in the graph's own layout."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxinfer.models import build
from mlxinfer.nn.weights import Dense, Matrix, Recipe

GOLDEN = Path(__file__).parents[2] / "golden" / "arch"
WIDE = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
"""Sizes that groups of 32 and 64 divide."""


class RandomWeights:
    """A `Weights` that makes up whatever it is asked for, and keeps it in `tensors`."""

    def __init__(self, tied: bool, dtype: mx.Dtype) -> None:
        self.tensors: dict[str, mx.array] = {}
        self._random = np.random.default_rng(1)
        self._tied = tied
        self._dtype = dtype

    def has(self, name: str) -> bool:
        return name == "lm_head.weight" and not self._tied

    def matrix(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), quantizable: bool = True) -> Matrix:
        return Dense(self._make(name, shape, 0.0, self._dtype))

    def vector(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), dtype: mx.Dtype | None = None) -> mx.array:
        return self._make(name, shape, 1.0 if "norm" in name else 0.0, dtype or self._dtype)

    def _make(self, name: str, shape: tuple[int, ...], centre: float, dtype: mx.Dtype) -> mx.array:
        self.tensors[name] = mx.array(self._random.normal(centre, 0.12, shape).astype(np.float32)).astype(dtype)
        return self.tensors[name]


def config_of(architecture: str, **changes: Any) -> dict[str, Any]:
    """That of a golden checkpoint, in wide sizes as far as it has them."""
    config = json.loads((GOLDEN / architecture / "config.json").read_text())
    return config | {key: value for key, value in WIDE.items() if key in config} | changes


def random_checkpoint(directory: Path, config: dict[str, Any], *, dtype: mx.Dtype = mx.float32) -> Path:
    """Write config.json and model.safetensors into a new directory."""
    weights = RandomWeights(bool(config.get("tie_word_embeddings")), dtype)
    build(config, weights)
    directory.mkdir()
    mx.save_safetensors(str(directory / "model.safetensors"), weights.tensors, {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def grow(file: Path, name: str, shape: tuple[int, ...]) -> None:
    """Rewrite a file of float32 tensors so that one of them has this shape, as a hole at the end."""
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    kept, body, end = {}, b"", 0
    for key, entry in header.items():
        if key in ("__metadata__", name):
            continue
        start, stop = entry["data_offsets"]
        kept[key] = {**entry, "data_offsets": [end, end + stop - start]}
        body += data[8 + length + start : 8 + length + stop]
        end += stop - start
    size = 4 * int(np.prod(shape, dtype=object))
    kept[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
    text = json.dumps(kept).encode()
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text + body)
        out.truncate(8 + len(text) + end + size)
