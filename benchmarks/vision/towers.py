"""Full-size towers with random weights, and the arithmetic of an image."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import mlx.core as mx

from mlxinfer.models.towers import Tower, tower_of
from mlxinfer.nn.weights import Dense, Matrix, Recipe
from mlxinfer.util.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Case:
    """A tower and the side in pixels of one square image."""

    config: Mapping[str, Any]
    side: int

    @property
    def vision(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.config["vision_config"]
        return found

    @property
    def layers(self) -> int:
        return int(self.vision.get("num_hidden_layers") or self.vision["depth"])

    def operations(self) -> int:
        """Return a lower bound of the operations: the products and the attention of all blocks."""
        rows, width, inner = (self.side // self.vision["patch_size"]) ** 2, self.vision["hidden_size"], self.vision["intermediate_size"]
        operations: int = 4 * self.layers * rows * width * (2 * width + inner + rows)
        return operations

    def pixels(self) -> mx.array:
        """Return random pixels in the layout of the tower."""
        patch = self.vision["patch_size"]
        patches = self.config["model_type"].startswith("qwen")
        shape = ((self.side // patch) ** 2, 3 * 2 * patch**2) if patches else (1, 3, self.side, self.side)
        return mx.random.normal(shape, key=mx.random.key(0))


def _siglip(hidden: int, inner: int, layers: int, heads: int, side: int, patch: int) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads}
    return sizes | {"image_size": side, "patch_size": patch, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}


CASES = {
    "smolvlm-256m": Case(
        {
            "model_type": "smolvlm", "scale_factor": 4, "text_config": {"hidden_size": 576},
            "vision_config": _siglip(768, 3072, 12, 12, 512, 16),
        },
        512,
    ),
    "qwen3-vl-2b": Case(
        {
            "model_type": "qwen3_vl",
            "text_config": {"hidden_size": 2048},
            "vision_config": {
                "hidden_size": 1024, "intermediate_size": 4096, "depth": 24, "num_heads": 16, "patch_size": 16, "out_hidden_size": 2048,
                "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17], "hidden_act": "gelu_pytorch_tanh",
            },
        },
        512,
    ),
    "gemma3-4b": Case(
        {
            "model_type": "gemma3", "mm_tokens_per_image": 256, "text_config": {"hidden_size": 2560},
            "vision_config": _siglip(1152, 4304, 27, 16, 896, 14),
        },
        896,
    ),
}  # fmt: skip
"""A tile of SmolVLM-256M (1024 patches), an image of Qwen3-VL 2B (1024), and SigLIP so400m in Gemma 3 (4096)."""


class RandomWeights:
    """Answers every request with random numbers from a seed in the name, scaled so that activations keep their size."""

    def __init__(self, dtype: mx.Dtype) -> None:
        """`dtype` is that of matrices."""
        self.dtype = dtype
        self.asked: dict[str, mx.array] = {}
        """Tensors as a checkpoint has them."""

    def has(self, name: str) -> bool:
        return False

    def matrix(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), quantizable: bool = True) -> Matrix:
        recipe = next((each for each in otherwise if each.sources == (name,)), None)
        stored = recipe.shapes[0] if recipe else shape
        weight = (_random(name, stored) / prod(shape[1:]) ** 0.5).astype(self.dtype)
        self.asked[name] = weight
        return recipe.make([Dense(weight)]) if recipe else Dense(weight)

    def vector(self, name: str, shape: tuple[int, ...], *, otherwise: Sequence[Recipe] = (), dtype: mx.Dtype | None = None) -> mx.array:
        values = _random(name, shape) * 0.1
        self.asked[name] = 1 + values if "norm" in name and name.endswith("weight") else values
        return self.asked[name]


def _random(name: str, shape: tuple[int, ...]) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(zlib.crc32(name.encode())))


def random_tower(case: Case, dtype: mx.Dtype) -> tuple[Tower, RandomWeights]:
    weights = RandomWeights(dtype)
    return tower_of(case.config, weights), weights
