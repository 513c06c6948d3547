"""Parts of the towers of Qwen: patches of two frames in squares, rotary positions of rows and columns, mergers.

Source: modeling_qwen2_vl.py, modeling_qwen2_5_vl.py and modeling_qwen3_vl.py of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import mlx.core as mx
import numpy as np

from ...nn.linear import JoinedLinear, Linear
from ...nn.norms import RMSNorm
from ...nn.weights import Weights
from ...util.dataclass import dataclass
from .parts import Floats, PatchAttention, activation, grid_positions, inverse_frequencies
from .tower import VisionReader, prefix_of

PREFIXES = ("model.visual.", "visual.", "vision_tower.", "model.vision_tower.", "model.language_model.visual.")


@dataclass(frozen=True, slots=True)
class QwenSizes:
    """Sizes that all these towers have."""

    hidden: int
    inner: int
    """Channels inside the MLP."""
    layers: int
    heads: int
    patch: int
    frames: int
    """Frames of a patch; a still is repeated."""
    merge: int
    """Patches along a side of an image row's square."""
    text: int
    """Channels of the text model."""
    theta: float

    @property
    def dim(self) -> int:
        return self.hidden // self.heads

    @classmethod
    def read(cls, reader: VisionReader, *, hidden: int, inner: int, layers: int, patch: int, text: int) -> QwenSizes:
        """Read the rest of the sizes; `layers` and `patch` are defaults."""
        reader.only("in_channels", 3)
        reader.only("in_chans", 3)
        heads = reader.count("num_heads", 16)
        if hidden % (4 * heads):
            raise reader.bad("num_heads", heads, f"so that heads of {hidden} channels have a multiple of four")
        frames = reader.take("temporal_patch_size", 2)
        if frames not in (2, [2, 2]):
            raise reader.bad("temporal_patch_size", frames, "2")
        return cls(
            hidden,
            inner,
            reader.count("depth", layers),
            heads,
            reader.side("patch_size", patch),
            2,
            reader.integer("spatial_merge_size", 2),
            text,
            reader.rope_theta(10000.0),
        )


def find_prefix(weights: Weights) -> str:
    return prefix_of(weights, "patch_embed.proj.weight", *PREFIXES)


def load_joined_attention(weights: Weights, name: str, sizes: QwenSizes) -> PatchAttention:
    """Load `attn.qkv` and `attn.proj`, with biases."""
    hidden = sizes.hidden
    qkv = JoinedLinear.fused(Linear.load(weights, f"{name}.attn.qkv", 3 * hidden, hidden, bias=True), [hidden] * 3)
    return PatchAttention(qkv, Linear.load(weights, f"{name}.attn.proj", hidden, hidden, bias=True), sizes.dim)


@lru_cache(maxsize=16)
def axial_angles(rows: int, columns: int, block: int, dim: int, theta: float) -> Floats:
    """Return `[rows * columns, dim]` in the order of squares: half of the frequencies turn with the row, half with the column."""
    row, column = grid_positions(rows, columns, block)
    waves = inverse_frequencies(dim // 2, theta)
    return np.tile(np.concatenate([np.outer(row, waves), np.outer(column, waves)], axis=1), 2).astype(np.float32)


class Merger:
    """Projects the `count` patches of a square to a row of the text model, with an exact GELU between two products."""

    def __init__(self, norm: RMSNorm, up: Linear, down: Linear, count: int, *, norm_after: bool = False) -> None:
        self.norm, self.up, self.down, self.count, self.norm_after = norm, up, down, count, norm_after
        self.act: Callable[[mx.array], mx.array] = activation("gelu")

    def __call__(self, x: mx.array) -> mx.array:
        """`[n, hidden]` to `[n / count, text hidden]`. With `norm_after`, whole squares are normed."""
        wide = self.count * x.shape[-1]
        x = self.norm(x.reshape(-1, wide)) if self.norm_after else self.norm(x).reshape(-1, wide)
        return self.down(self.act(self.up(x)))
