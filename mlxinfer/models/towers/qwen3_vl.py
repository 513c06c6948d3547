"""Qwen3-VL and Qwen3.5: resampled positions, full attention in each image, and features of middle layers (deepstack).

Source: modeling_qwen3_vl.py and modeling_qwen3_5.py of transformers.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from functools import lru_cache
from math import isqrt
from typing import Any

import mlx.core as mx
import numpy as np

from ...nn.linear import Linear
from ...nn.mlp import PlainMLP
from ...nn.norms import LayerNorm
from ...nn.weights import Weights
from .parts import Floats, Ints, PatchRotation, VisionBlock, activation, grid_positions, load_patches, load_table
from .qwen_parts import Merger, QwenSizes, axial_angles, find_prefix, load_joined_attention
from .tower import Encoded, Size, Stages, Tower, VisionReader, runs_of

_EPS = 1e-6


class Qwen3VLTower(Tower):
    """Takes patches `[patches, 3 * 2 * patch * patch]`, in the order of squares of `merge * merge` patches, a row each."""

    def __init__(
        self, sizes: QwenSizes, patches: Linear, table: mx.array, blocks: list[VisionBlock], merger: Merger, deepstack: dict[int, Merger]
    ) -> None:
        self.patch = sizes.patch
        self.sizes, self.patches, self.table, self.blocks, self.merger = sizes, patches, table, blocks, merger
        self.deepstack = deepstack
        """Mergers by the layer whose result they take."""

    @property
    def added_layers(self) -> int:
        return len(self.deepstack)

    def stages(self, pixels: mx.array, sizes: Sequence[Size]) -> Stages:
        pixels = pixels.astype(self.merger.norm.weight.dtype)
        found, first = [], 0
        for size, count in runs_of(sizes):
            rows, columns = size[0] // self.sizes.patch, size[1] // self.sizes.patch
            last = first + count * rows * columns
            found.append((yield from self._encode(pixels[first:last], count, rows, columns)))
            first = last
        merged, *deep = (parts[0] if len(parts) == 1 else mx.concatenate(parts) for parts in map(list, zip(*found, strict=True)))
        return Encoded(merged, tuple(deep))

    def _encode(self, pixels: mx.array, batch: int, rows: int, columns: int) -> Generator[mx.array, None, list[mx.array]]:
        """Return the features of images of one size, then those of each deepstack layer."""
        sizes = self.sizes
        rotation = PatchRotation.of(axial_angles(rows, columns, sizes.merge, sizes.dim, sizes.theta))
        x = self.patches(pixels)
        x = (x.reshape(batch, rows * columns, -1) + self._positions(rows, columns).astype(x.dtype)).reshape(x.shape)
        deep = []
        for layer, block in enumerate(self.blocks):
            x = block(x, batch, rotation)
            if layer in self.deepstack:
                deep.append(self.deepstack[layer](x))
            yield x
        return [self.merger(x), *deep]

    def _positions(self, rows: int, columns: int) -> mx.array:
        """Return the table resampled to this grid, float32 `[rows * columns, hidden]`."""
        taps, shares = _taps(rows, columns, self.sizes.merge, isqrt(self.table.shape[0]))
        return (self.table[mx.array(taps)] * mx.array(shares)[..., None]).sum(axis=1)


@lru_cache(maxsize=16)
def _taps(rows: int, columns: int, block: int, side: int) -> tuple[Ints, Floats]:
    """Return the rows of a table of `side * side` that a patch takes, `[rows * columns, 4]`, and their shares.

    The resampling is bilinear, with aligned corners.
    """

    def along(places: Ints, count: int) -> tuple[Ints, Floats]:
        at = places.astype(np.float32) * np.float32((side - 1) / max(count - 1, 1))
        low = np.floor(at).astype(np.int64)
        part = at - low.astype(np.float32)
        return np.stack([low, np.minimum(low + 1, side - 1)], axis=1), np.stack([1 - part, part], axis=1)

    row, column = grid_positions(rows, columns, block)
    (above, share_above), (left, share_left) = along(row, rows), along(column, columns)
    taps = above[:, :, None] * side + left[:, None, :]
    shares = share_above[:, :, None] * share_left[:, None, :]
    return taps.reshape(-1, 4), shares.reshape(-1, 4).astype(np.float32)


def load(config: Mapping[str, Any], weights: Weights) -> Qwen3VLTower:
    plain = config["model_type"].startswith("qwen3_5")
    kinds = [config["model_type"], f"{config['model_type']}_vision", "qwen3_vl", "qwen3_vl_vision", "qwen3_vl_moe", "qwen3_vl_moe_vision"]
    reader = VisionReader(config, *kinds)
    hidden, inner = reader.integer("hidden_size", 1152), reader.integer("intermediate_size", 4304)
    sizes = QwenSizes.read(reader, hidden=hidden, inner=inner, layers=27, patch=16, text=reader.integer("out_hidden_size", 3584))
    act = activation(reader.text("hidden_act", "gelu_pytorch_tanh"))
    table = reader.integer("num_position_embeddings", 2304)
    deep = reader.integers("deepstack_visual_indexes")
    deep = deep if deep is not None else [] if plain else [8, 16, 24]
    if sorted(set(deep)) != deep or not all(0 <= layer < sizes.layers for layer in deep):
        raise reader.bad("deepstack_visual_indexes", deep, "layers of the tower in rising order")
    reader.finish()
    name = find_prefix(weights)
    return Qwen3VLTower(
        sizes,
        load_patches(weights, f"{name}patch_embed.proj", hidden, sizes.patch, frames=sizes.frames),
        load_table(weights, f"{name}pos_embed.weight", table, hidden),
        [_load_block(weights, f"{name}blocks.{layer}", sizes, act) for layer in range(sizes.layers)],
        _load_merger(weights, f"{name}merger", sizes),
        {layer: _load_merger(weights, f"{name}deepstack_merger_list.{k}", sizes, norm_after=True) for k, layer in enumerate(deep)},
    )


def _load_block(weights: Weights, name: str, sizes: QwenSizes, act: Any) -> VisionBlock:
    hidden, inner = sizes.hidden, sizes.inner
    up = Linear.load(weights, f"{name}.mlp.linear_fc1", inner, hidden, bias=True)
    down = Linear.load(weights, f"{name}.mlp.linear_fc2", hidden, inner, bias=True)
    norms = [LayerNorm.load_with_bias(weights, f"{name}.norm{k}", hidden, _EPS) for k in (1, 2)]
    return VisionBlock(load_joined_attention(weights, name, sizes), PlainMLP(up, down, act), (norms[0], norms[1]))


def _load_merger(weights: Weights, name: str, sizes: QwenSizes, *, norm_after: bool = False) -> Merger:
    count = sizes.merge**2
    wide = count * sizes.hidden
    norm = LayerNorm.load_with_bias(weights, f"{name}.norm", wide if norm_after else sizes.hidden, _EPS)
    up = Linear.load(weights, f"{name}.linear_fc1", wide, wide, bias=True)
    down = Linear.load(weights, f"{name}.linear_fc2", sizes.text, wide, bias=True)
    return Merger(norm, up, down, count, norm_after=norm_after)
