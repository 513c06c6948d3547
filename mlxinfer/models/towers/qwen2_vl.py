"""Qwen2-VL and Qwen2.5-VL. The latter attends within windows, except in a few layers, and has RMS norms and gated MLPs.

Source: modeling_qwen2_vl.py and modeling_qwen2_5_vl.py of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from ...nn.linear import Linear
from ...nn.mlp import GatedMLP, PlainMLP
from ...nn.norms import LayerNorm, RMSNorm
from ...nn.weights import Weights
from .parts import Ints, PatchRotation, VisionBlock, activation, gate, load_patches
from .qwen_parts import Merger, QwenSizes, axial_angles, find_prefix, load_joined_attention
from .tower import Encoded, PartStages, Size, Stages, Tower, VisionReader

_EPS = 1e-6


class Qwen2VLTower(Tower):
    """Takes patches `[patches, 3 * 2 * patch * patch]`, in the order of squares of `merge * merge` patches, a row each.

    `window` is the side of a window in squares (0: none), and `full` are the layers without windows. Windows of one shape are
    neighbours, so that attention takes them as a batch.
    """

    def __init__(
        self, sizes: QwenSizes, patches: Linear, blocks: list[VisionBlock], merger: Merger, *, window: int = 0, full: Sequence[int] = ()
    ) -> None:
        self.patch = sizes.patch
        self.sizes, self.patches, self.blocks, self.merger = sizes, patches, blocks, merger
        self.window, self.full = window, frozenset(full)

    def stages(self, pixels: mx.array, sizes: Sequence[Size]) -> Stages:
        pixels = pixels.astype(self.merger.norm.weight.dtype)
        found, first = [], 0
        for height, width in sizes:
            rows, columns = height // self.sizes.patch, width // self.sizes.patch
            found.append((yield from self._encode(pixels[first : first + rows * columns], rows, columns)))
            first += rows * columns
        return Encoded(found[0] if len(found) == 1 else mx.concatenate(found))

    def _encode(self, pixels: mx.array, rows: int, columns: int) -> PartStages:
        sizes, unit = self.sizes, self.sizes.merge**2
        angles = axial_angles(rows, columns, sizes.merge, sizes.dim, sizes.theta)
        x = self.patches(pixels)
        if not self.window:
            rotation = PatchRotation.of(angles)
            for block in self.blocks:
                x = block(x, 1, rotation)
                yield x
            return self.merger(x)
        order, shapes = _windows(rows // sizes.merge, columns // sizes.merge, self.window)
        x = x.reshape(-1, unit, x.shape[-1])[mx.array(order)].reshape(x.shape)
        rotation = PatchRotation.of(angles.reshape(-1, unit, sizes.dim)[order].reshape(angles.shape))
        for layer, block in enumerate(self.blocks):
            if layer in self.full:
                x = block(x, 1, rotation)
            else:
                x = _in_windows(block, x, [(count, length * unit) for count, length in shapes], rotation)
            yield x
        return self.merger(x)[mx.array(np.argsort(order))]


def _in_windows(block: VisionBlock, x: mx.array, shapes: list[tuple[int, int]], rotation: PatchRotation) -> mx.array:
    """Apply a block to windows; `shapes` are (number, rows) of each run of equal windows."""
    parts, first = [], 0
    normed = block.norms[0](x)
    for count, length in shapes:
        last = first + count * length
        own = PatchRotation(rotation.cos[first:last], rotation.sin[first:last])
        parts.append(block.attention(normed[first:last], count, own))
        first = last
    return block.feed_forward(x + (parts[0] if len(parts) == 1 else mx.concatenate(parts)))


@lru_cache(maxsize=16)
def _windows(rows: int, columns: int, side: int) -> tuple[Ints, list[tuple[int, int]]]:
    """Return an order of squares by windows, and the (number, squares) of each run of equal windows: full ones, then those at edges."""
    numbered = np.arange(rows * columns).reshape(rows, columns)
    order, shapes = [], []
    cuts = [(0, rows // side * side, side), (rows // side * side, rows, rows % side)]
    across = [(0, columns // side * side, side), (columns // side * side, columns, columns % side)]
    for top, bottom, height in cuts:
        for left, right, width in across:
            part = numbered[top:bottom, left:right]
            if not part.size:
                continue
            windows = part.reshape((bottom - top) // height, height, (right - left) // width, width).transpose(0, 2, 1, 3)
            order.append(windows.reshape(-1))
            shapes.append((part.size // (height * width), height * width))
    return np.concatenate(order), shapes


def load(config: Mapping[str, Any], weights: Weights) -> Qwen2VLTower:
    return _load_2_5(config, weights) if config["model_type"] == "qwen2_5_vl" else _load_2(config, weights)


def _load_2(config: Mapping[str, Any], weights: Weights) -> Qwen2VLTower:
    reader = VisionReader(config, "qwen2_vl", "qwen2_vl_vision")
    hidden = reader.integer("embed_dim", 1280)
    inner, text = int(hidden * reader.positive("mlp_ratio", 4)), reader.integer("hidden_size", 3584)
    sizes = QwenSizes.read(reader, hidden=hidden, inner=inner, layers=32, patch=14, text=text)
    act = activation(reader.text("hidden_act", "quick_gelu"))
    reader.skip("spatial_patch_size")
    reader.finish()

    def block(name: str) -> VisionBlock:
        up = Linear.load(weights, f"{name}.mlp.fc1", inner, hidden, bias=True)
        down = Linear.load(weights, f"{name}.mlp.fc2", hidden, inner, bias=True)
        norms = [LayerNorm.load_with_bias(weights, f"{name}.norm{k}", hidden, _EPS) for k in (1, 2)]
        return VisionBlock(load_joined_attention(weights, name, sizes), PlainMLP(up, down, act), (norms[0], norms[1]))

    return _load_tower(weights, sizes, block, lambda name: LayerNorm.load_with_bias(weights, name, hidden, _EPS))


def _load_2_5(config: Mapping[str, Any], weights: Weights) -> Qwen2VLTower:
    reader = VisionReader(config, "qwen2_5_vl", "qwen2_5_vl_vision")
    hidden, inner = reader.integer("hidden_size", 3584), reader.integer("intermediate_size", 3420)
    sizes = QwenSizes.read(reader, hidden=hidden, inner=inner, layers=32, patch=14, text=reader.integer("out_hidden_size", 3584))
    act = gate(reader.text("hidden_act", "silu"))
    unit = sizes.merge * sizes.patch
    window, full = reader.integer("window_size", 112) // unit, reader.integers("fullatt_block_indexes")
    if not window:
        raise reader.error("window_size", f"must be at least {unit}")
    reader.skip("spatial_patch_size", "tokens_per_second")
    reader.finish()

    def block(name: str) -> VisionBlock:
        mlp = GatedMLP.load(weights, f"{name}.mlp", hidden, inner, act, bias=True)
        norms = [RMSNorm.load(weights, f"{name}.norm{k}", hidden, _EPS) for k in (1, 2)]
        return VisionBlock(load_joined_attention(weights, name, sizes), mlp, (norms[0], norms[1]))

    full = [7, 15, 23, 31] if full is None else full
    return _load_tower(weights, sizes, block, lambda name: RMSNorm.load(weights, name, hidden, _EPS), window=window, full=full)


def _load_tower(
    weights: Weights,
    sizes: QwenSizes,
    block: Callable[[str], VisionBlock],
    norm: Callable[[str], RMSNorm],
    *,
    window: int = 0,
    full: Sequence[int] = (),
) -> Qwen2VLTower:
    name, wide = find_prefix(weights), sizes.hidden * sizes.merge**2
    up = Linear.load(weights, f"{name}merger.mlp.0", wide, wide, bias=True)
    down = Linear.load(weights, f"{name}merger.mlp.2", sizes.text, wide, bias=True)
    return Qwen2VLTower(
        sizes,
        load_patches(weights, f"{name}patch_embed.proj", sizes.hidden, sizes.patch, frames=sizes.frames, bias=False),
        [block(f"{name}blocks.{layer}") for layer in range(sizes.layers)],
        Merger(norm(f"{name}merger.ln_q"), up, down, sizes.merge**2),
        window=window,
        full=full,
    )
