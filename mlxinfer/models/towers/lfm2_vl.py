"""LFM2-VL: SigLIP 2 (NaFlex) on grids of any size, whose positions are resized to the grid, and an MLP on squares of patches.

Source: modeling_siglip2.py and modeling_lfm2_vl.py of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import isqrt
from typing import Any

import mlx.core as mx
import numpy as np

from ...nn.linear import Linear
from ...nn.norms import LayerNorm
from ...nn.weights import Weights
from ..config_reader import ConfigReader
from .parts import Floats, activation, load_table, merge_squares
from .siglip import SiglipEncoder, SiglipSizes
from .tower import Encoded, Size, Stages, Tower, VisionReader, prefix_of, runs_of, text_config_of

_EPS = 1e-5
"""Of the projector's norm."""
_PREFIXES = ("model.vision_tower.vision_model.", "vision_tower.vision_model.", "model.vision_tower.", "vision_tower.")


class Lfm2VLTower(Tower):
    """Takes patches `[patches, patch * patch * 3]`, row by row of each piece; each square of `merge * merge` becomes a row."""

    def __init__(
        self,
        patches: Linear,
        table: mx.array,
        encoder: SiglipEncoder,
        norm: LayerNorm | None,
        products: tuple[Linear, Linear],
        act: Callable[[mx.array], mx.array],
        patch: int,
        merge: int,
    ) -> None:
        self.patches, self.table, self.encoder, self.norm, self.products, self.act = patches, table, encoder, norm, products, act
        self.patch, self.merge = patch, merge

    def stages(self, pixels: mx.array, sizes: Sequence[Size]) -> Stages:
        x, found, first = self.patches(pixels.astype(self.encoder.norm.weight.dtype)), [], 0
        for size, count in runs_of(sizes):
            rows, columns = size[0] // self.patch, size[1] // self.patch
            last = first + count * rows * columns
            placed = x[first:last].reshape(count, rows * columns, -1) + self._positions(rows, columns).astype(x.dtype)
            encoded = yield from self.encoder.stages(placed.reshape(last - first, -1), count)
            found.append(merge_squares(encoded, rows, columns, self.merge))
            first = last
        merged = found[0] if len(found) == 1 else mx.concatenate(found)
        up, down = self.products
        return Encoded(down(self.act(up(merged if self.norm is None else self.norm(merged)))))

    def _positions(self, rows: int, columns: int) -> mx.array:
        """Return the table resized to a grid, float32 `[rows * columns, hidden]`."""
        side = isqrt(self.table.shape[0])
        table = self.table.reshape(side, side, -1)
        tall = mx.tensordot(mx.array(_shares(side, rows)), table, axes=1)
        return mx.einsum("cs,rsd->rcd", mx.array(_shares(side, columns)), tall).reshape(rows * columns, -1)


@lru_cache(maxsize=64)
def _shares(side: int, count: int) -> Floats:
    """Return the shares `[count, side]` of a bilinear, antialiased resizing of `side` values to `count`, corners not aligned."""
    scale = np.float32(side) / np.float32(count)
    centre = (np.arange(count, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
    distance = np.abs(np.arange(side, dtype=np.float32) - centre[:, None]) / max(scale, np.float32(1))
    shares = np.maximum(1 - distance, 0)
    return np.asarray(shares / shares.sum(axis=1, keepdims=True), np.float32)


def load(config: Mapping[str, Any], weights: Weights) -> Lfm2VLTower:
    reader = VisionReader(config, "siglip2_vision_model")
    sizes = SiglipSizes.read(reader)
    patch, table = reader.side("patch_size", 16), reader.integer("num_patches", 256)
    reader.skip("image_size")
    reader.finish()
    outer, text = ConfigReader(config), text_config_of(config).integer("hidden_size")
    outer.only("vision_feature_layer", -1)
    merge, wide = outer.integer("downsample_factor", 2), outer.integer("projector_hidden_size", 2560)
    bias, normed = outer.boolean("projector_bias", True), outer.boolean("projector_use_layernorm", True)
    act = activation(outer.text("projector_hidden_act", "gelu"))
    name = prefix_of(weights, "post_layernorm.weight", *_PREFIXES)
    projector = prefix_of(weights, "linear_1.weight", "model.multi_modal_projector.", "multi_modal_projector.")
    joined = sizes.hidden * merge**2
    return Lfm2VLTower(
        Linear.load(weights, f"{name}embeddings.patch_embedding", sizes.hidden, 3 * patch**2, bias=True, quantizable=False),
        load_table(weights, f"{name}embeddings.position_embedding.weight", table, sizes.hidden),
        SiglipEncoder.load(weights, name, sizes),
        LayerNorm.load_with_bias(weights, f"{projector}layer_norm", joined, _EPS) if normed else None,
        (
            Linear.load(weights, f"{projector}linear_1", wide, joined, bias=bias),
            Linear.load(weights, f"{projector}linear_2", text, wide, bias=bias),
        ),
        act,
        patch,
        merge,
    )
