"""Gemma 4: patches of any grid, four norms a block, two rotated halves, and a pool; E models clip their products.

Source: modeling_gemma4.py of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from ...nn.linear import JoinedLinear, Linear
from ...nn.norms import RMSNorm
from ...nn.weights import Weights
from ...util.dataclass import dataclass
from .parts import Floats, PatchAttention, PatchRotation, VisionBlock, activation, grid_positions, inverse_frequencies
from .tower import Encoded, PartStages, Size, Stages, Tower, VisionReader, prefix_of, runs_of, text_config_of


@dataclass(frozen=True, slots=True)
class ClippedLinear:
    """A product whose input and output are limited to stored ranges, scalars each."""

    linear: Linear
    inputs: tuple[mx.array, mx.array]
    outputs: tuple[mx.array, mx.array]

    def __call__(self, x: mx.array) -> mx.array:
        """`[..., in]` to `[..., out]`."""
        return mx.clip(self.linear(mx.clip(x, *self.inputs)), *self.outputs)


class JoinedClipped:
    """Clipped products of one input; their ranges differ, so they are computed one by one."""

    def __init__(self, parts: Sequence[ClippedLinear]) -> None:
        self.parts = parts

    def __call__(self, x: mx.array) -> list[mx.array]:
        return [part(x) for part in self.parts]


@dataclass(frozen=True, slots=True)
class SplitMLP:
    """`down(activation(gate) * up)`, with plain or clipped products."""

    gate_up: JoinedLinear | JoinedClipped
    down: Linear | ClippedLinear
    activation: Callable[[mx.array], mx.array]

    def __call__(self, x: mx.array) -> mx.array:
        """`[n, hidden]` to the same shape."""
        gate, up = self.gate_up(x)
        return self.down(self.activation(gate) * up)


@dataclass(frozen=True, slots=True)
class NormedHeads:
    """Norms of queries and keys per head, and of values without a weight."""

    q_norm: RMSNorm
    k_norm: RMSNorm

    def __call__(self, q: mx.array, k: mx.array, v: mx.array) -> list[mx.array]:
        return [self.q_norm(q), self.k_norm(k), mx.fast.rms_norm(v, None, self.q_norm.eps)]


@dataclass(frozen=True, slots=True)
class Gemma4Sizes:
    """Sizes of the tower."""

    hidden: int
    inner: int
    """Channels inside the MLP."""
    layers: int
    heads: int
    kv: int
    dim: int
    eps: float
    patch: int
    pool: int
    """Patches along a side of an image row's square."""
    table: int
    """Positions along an axis."""
    theta: float
    clipped: bool
    standardized: bool

    @classmethod
    def read(cls, reader: VisionReader) -> Gemma4Sizes:
        sizes = cls(
            reader.integer("hidden_size", 768),
            reader.integer("intermediate_size", 3072),
            reader.count("num_hidden_layers", 16),
            reader.count("num_attention_heads", 12),
            reader.count("num_key_value_heads", 12),
            reader.integer("head_dim", 64),
            reader.number("rms_norm_eps", 1e-6),
            reader.side("patch_size", 16),
            reader.integer("pooling_kernel_size", 3),
            reader.integer("position_embedding_size", 10240),
            reader.rope_theta(100.0),
            reader.boolean("use_clipped_linears", False),
            reader.boolean("standardize", False),
        )
        if sizes.dim % 4 or sizes.heads % sizes.kv:
            raise reader.bad("head_dim", sizes.dim, "a multiple of 4, and num_key_value_heads must divide num_attention_heads")
        reader.only("attention_bias", False)
        # Positions are read from a table, and outputs have the tower's own width.
        reader.skip("max_position_embeddings", "default_output_length", "global_head_dim")
        return sizes


class Gemma4Tower(Tower):
    """Takes patches `[patches, patch * patch * 3]` of 0 to 1, row by row; each square of `pool * pool` patches becomes a row."""

    def __init__(self, sizes: Gemma4Sizes, patches: Linear, table: mx.array, blocks: list[VisionBlock], projection: Linear) -> None:
        self.patch = sizes.patch
        self.sizes, self.patches, self.table, self.blocks, self.projection = sizes, patches, table, blocks, projection
        self.standard: tuple[mx.array, mx.array] | None = None
        """Offset and scale of the pooled rows, float32 `[hidden]` each."""

    def stages(self, pixels: mx.array, sizes: Sequence[Size]) -> Stages:
        found, first = [], 0
        for size, count in runs_of(sizes):
            rows, columns = size[0] // self.sizes.patch, size[1] // self.sizes.patch
            last = first + count * rows * columns
            found.append((yield from self._encode(pixels[first:last], count, rows, columns)))
            first = last
        return Encoded(found[0] if len(found) == 1 else mx.concatenate(found))

    def _encode(self, pixels: mx.array, batch: int, rows: int, columns: int) -> PartStages:
        dtype, sizes = self.table.dtype, self.sizes
        row, column = grid_positions(rows, columns)
        x = self.patches((2 * (pixels - 0.5)).astype(dtype))
        places = self.table[0][mx.array(column)] + self.table[1][mx.array(row)]
        x = (x.reshape(batch, rows * columns, -1) + places).reshape(x.shape)
        rotation = PatchRotation.of(_angles(rows, columns, sizes.dim, sizes.theta), parts=2)
        for block in self.blocks:
            x = block(x, batch, rotation)
            yield x
        squares = x.reshape(batch, rows // sizes.pool, sizes.pool, columns // sizes.pool, sizes.pool, -1).astype(mx.float32)
        pooled = squares.mean(axis=(2, 4)).reshape(-1, x.shape[-1]).astype(dtype).astype(mx.float32) * sizes.hidden**0.5
        if self.standard is not None:
            pooled = (pooled - self.standard[0]) * self.standard[1]
        return self.projection(mx.fast.rms_norm(pooled.astype(dtype), None, sizes.eps))


@lru_cache(maxsize=16)
def _angles(rows: int, columns: int, dim: int, theta: float) -> Floats:
    """Return `[rows * columns, dim]`: the first half of a head turns with the column, the second with the row."""
    row, column = grid_positions(rows, columns)
    waves = inverse_frequencies(dim // 2, theta)
    parts = [np.tile(np.outer(places, waves), 2) for places in (column, row)]
    return np.concatenate(parts, axis=1).astype(np.float32)


def load(config: Mapping[str, Any], weights: Weights) -> Gemma4Tower:
    reader = VisionReader(config, "gemma4_vision")
    sizes, act = Gemma4Sizes.read(reader), activation(reader.text("hidden_activation", "gelu_pytorch_tanh"))
    reader.finish()
    text = text_config_of(config).integer("hidden_size")
    name = prefix_of(weights, "patch_embedder.input_proj.weight", "model.vision_tower.", "vision_tower.")
    embed = prefix_of(weights, "embedding_projection.weight", "model.embed_vision.", "embed_vision.")
    tower = Gemma4Tower(
        sizes,
        Linear.load(weights, f"{name}patch_embedder.input_proj", sizes.hidden, 3 * sizes.patch**2, quantizable=False),
        weights.vector(f"{name}patch_embedder.position_embedding_table", (2, sizes.table, sizes.hidden)),
        [_load_block(weights, f"{name}encoder.layers.{layer}", sizes, act) for layer in range(sizes.layers)],
        Linear.load(weights, f"{embed}embedding_projection", text, sizes.hidden),
    )
    if sizes.standardized:
        bias, scale = (weights.vector(f"{name}{part}", (sizes.hidden,), dtype=mx.float32) for part in ("std_bias", "std_scale"))
        tower.standard = (bias, scale)
    return tower


def _load_block(weights: Weights, name: str, sizes: Gemma4Sizes, act: Callable[[mx.array], mx.array]) -> VisionBlock:
    names = ("input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")
    norms = [RMSNorm.load(weights, f"{name}.{part}", sizes.hidden, sizes.eps) for part in names]
    attention = _load_attention(weights, f"{name}.self_attn", sizes)
    return VisionBlock(attention, _load_mlp(weights, f"{name}.mlp", sizes, act), (norms[0], norms[1]), (norms[2], norms[3]))


def _load_attention(weights: Weights, name: str, sizes: Gemma4Sizes) -> PatchAttention:
    norms = [RMSNorm.load(weights, f"{name}.{part}", sizes.dim, sizes.eps) for part in ("q_norm", "k_norm")]
    outputs = [sizes.heads * sizes.dim, sizes.kv * sizes.dim, sizes.kv * sizes.dim]
    qkv = _load_joined(weights, [f"{name}.{part}" for part in ("q_proj", "k_proj", "v_proj")], outputs, sizes.hidden, sizes.clipped)
    output = _load_linear(weights, f"{name}.o_proj", sizes.hidden, outputs[0], sizes.clipped)
    return PatchAttention(qkv, output, sizes.dim, scale=1.0, norm_heads=NormedHeads(norms[0], norms[1]))


def _load_mlp(weights: Weights, name: str, sizes: Gemma4Sizes, act: Callable[[mx.array], mx.array]) -> SplitMLP:
    names = [f"{name}.{part}" for part in ("gate_proj", "up_proj")]
    gate_up = _load_joined(weights, names, [sizes.inner] * 2, sizes.hidden, sizes.clipped)
    down = _load_linear(weights, f"{name}.down_proj", sizes.hidden, sizes.inner, sizes.clipped)
    return SplitMLP(gate_up, down, act)


def _load_joined(weights: Weights, names: Sequence[str], outputs: Sequence[int], wide: int, clipped: bool) -> JoinedLinear | JoinedClipped:
    if clipped:
        return JoinedClipped([_load_clipped(weights, name, out, wide) for name, out in zip(names, outputs, strict=True)])
    return JoinedLinear([_load_plain(weights, name, out, wide) for name, out in zip(names, outputs, strict=True)], outputs)


def _load_linear(weights: Weights, name: str, out: int, wide: int, clipped: bool) -> Linear | ClippedLinear:
    return _load_clipped(weights, name, out, wide) if clipped else _load_plain(weights, name, out, wide)


def _load_plain(weights: Weights, name: str, out: int, wide: int) -> Linear:
    return Linear.load(weights, f"{name}.linear", out, wide)


def _load_clipped(weights: Weights, name: str, out: int, wide: int) -> ClippedLinear:
    low, high, least, most = (weights.vector(f"{name}.{part}", ()) for part in ("input_min", "input_max", "output_min", "output_max"))
    return ClippedLinear(_load_plain(weights, name, out, wide), (low, high), (least, most))
