"""Pixtral, the tower of Mistral Small 3 and Ministral 3: images of any size, rotary positions, a patch merger.

Source: modeling_pixtral.py and modeling_mistral3.py of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from ...nn.linear import Linear
from ...nn.mlp import GatedMLP
from ...nn.norms import RMSNorm
from ...nn.weights import Weights
from ..config_reader import ConfigReader
from .parts import (
    Floats,
    PatchRotation,
    VisionBlock,
    activation,
    gate,
    grid_positions,
    inverse_frequencies,
    load_attention,
    load_patches,
    patch_rows,
)
from .tower import Encoded, Size, Stages, Tower, VisionReader, prefix_of, text_config_of

_EPS = 1e-5


class PatchMerger:
    """The projector: a norm, a product of `side * side` neighbours, and an MLP."""

    def __init__(self, norm: RMSNorm, merging: Linear, up: Linear, down: Linear, act: Callable[[mx.array], mx.array], side: int) -> None:
        self.norm, self.merging, self.up, self.down, self.act, self.side = norm, merging, up, down, act, side

    @classmethod
    def load(cls, weights: Weights, name: str, config: Mapping[str, Any], hidden: int) -> PatchMerger:
        """Read the settings beside `vision_config`, and load the projector under the prefix `name`."""
        outer, text = ConfigReader(config), text_config_of(config)
        outer.only("vision_feature_layer", -1, [-1])
        side, bias = outer.integer("spatial_merge_size", 2), outer.boolean("multimodal_projector_bias", False)
        width = text.integer("hidden_size")
        return cls(
            RMSNorm.load(weights, f"{name}norm", hidden, text.number("rms_norm_eps", 1e-6)),
            Linear.load(weights, f"{name}patch_merger.merging_layer", hidden, hidden * side**2),
            Linear.load(weights, f"{name}linear_1", width, hidden, bias=bias),
            Linear.load(weights, f"{name}linear_2", width, width, bias=bias),
            activation(outer.text("projector_hidden_act", "gelu")),
            side,
        )

    def __call__(self, x: mx.array, rows: int, columns: int) -> mx.array:
        """`[batch * rows * columns, hidden]` to `[batch * tokens, text hidden]`. Neighbours are the innermost axes, after the channels."""
        x, side = self.norm(x), self.side
        rows, columns = rows // side * side, columns // side * side
        cut = x.reshape(-1, rows // side, side, columns // side, side, x.shape[-1])
        merged = self.merging(cut.transpose(0, 1, 3, 5, 2, 4).reshape(-1, side * side * x.shape[-1]))
        return self.down(self.act(self.up(merged)))


class PixtralTower(Tower):
    """Takes images `[images, 3, height, width]` of one size; sides are multiples of the merged patch."""

    def __init__(
        self, patches: Linear, norm: RMSNorm, blocks: list[VisionBlock], merger: PatchMerger, patch: int, dim: int, theta: float
    ) -> None:
        self.patches, self.norm, self.blocks, self.merger = patches, norm, blocks, merger
        self.patch, self.dim, self.theta = patch, dim, theta

    def stages(self, pixels: mx.array, sizes: Sequence[Size]) -> Stages:
        batch, rows, columns = pixels.shape[0], pixels.shape[2] // self.patch, pixels.shape[3] // self.patch
        rotation = PatchRotation.of(_angles(rows, columns, self.dim, self.theta))
        x = self.norm(self.patches(patch_rows(pixels.astype(self.norm.weight.dtype), self.patch)))
        for block in self.blocks:
            x = block(x, batch, rotation)
            yield x
        return Encoded(self.merger(x, rows, columns))


@lru_cache(maxsize=16)
def _angles(rows: int, columns: int, dim: int, theta: float) -> Floats:
    """Return `[rows * columns, dim]`: even frequencies turn with the row, odd ones with the column."""
    row, column = grid_positions(rows, columns)
    waves = inverse_frequencies(dim, theta)
    half = np.concatenate([np.outer(row, waves[::2]), np.outer(column, waves[1::2])], axis=1)
    return np.tile(half, 2).astype(np.float32)


def load(config: Mapping[str, Any], weights: Weights) -> PixtralTower:
    reader = VisionReader(config, "pixtral")
    reader.only("num_channels", 3)
    hidden, inner = reader.integer("hidden_size", 1024), reader.integer("intermediate_size", 4096)
    layers, heads = reader.count("num_hidden_layers", 24), reader.count("num_attention_heads", 16)
    dim = reader.optional_integer("head_dim") or hidden // heads
    patch, theta = reader.side("patch_size", 16), reader.rope_theta(10000.0)
    act = gate(reader.text("hidden_act", "gelu"))
    reader.skip("image_size")
    reader.finish()
    name = prefix_of(weights, "ln_pre.weight", "vision_tower.", "model.vision_tower.", "vision_tower.vision_model.")
    projector = prefix_of(weights, "norm.weight", "multi_modal_projector.", "model.multi_modal_projector.")
    sizes = [heads * dim, heads * dim, heads * dim, hidden]
    blocks = []
    for layer in range(layers):
        place = f"{name}transformer.layers.{layer}"
        parts = [f"{place}.attention.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj")]
        before, after = (RMSNorm.load(weights, f"{place}.{part}", hidden, _EPS) for part in ("attention_norm", "ffn_norm"))
        attention = load_attention(weights, parts, sizes, dim, bias=False)
        blocks.append(VisionBlock(attention, GatedMLP.load(weights, f"{place}.feed_forward", hidden, inner, act), (before, after)))
    return PixtralTower(
        load_patches(weights, f"{name}patch_conv", hidden, patch, bias=False),
        RMSNorm.load(weights, f"{name}ln_pre", hidden, _EPS),
        blocks,
        PatchMerger.load(weights, projector, config, hidden),
        patch,
        dim,
        theta,
    )
