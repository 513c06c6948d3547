"""Gemma 4 12B: no tower. Large patches are normed, projected, and placed by two tables.

Source: modeling_gemma4_unified.py of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from ...nn.linear import Linear
from ...nn.norms import LayerNorm
from ...nn.weights import Weights
from .parts import grid_positions
from .tower import Encoded, Size, Stages, Tower, VisionReader, prefix_of, text_config_of

_EPS = 1e-5
_BEFORE = ("model.vision_embedder.", "vision_embedder.", "model.embed_vision.")
_AFTER = ("model.embed_vision.", "embed_vision.", "model.embed_vision.multimodal_embedder.", "embed_vision.multimodal_embedder.")


class Gemma4PatchEmbedder(Tower):
    """Takes patches `[patches, patch * patch * 3]` of 0 to 1, row by row; each becomes a row."""

    def __init__(self, patch: int, dense: Linear, norms: list[LayerNorm], table: mx.array, projection: Linear, eps: float) -> None:
        self.patch, self.dense, self.norms, self.table, self.projection, self.eps = patch, dense, norms, table, projection, eps

    def stages(self, pixels: mx.array, sizes: Sequence[Size]) -> Stages:
        """Yield nothing: there are no blocks."""
        yield from ()
        grids = [grid_positions(height // self.patch, width // self.patch) for height, width in sizes]
        row, column = (mx.concatenate([mx.array(grid[axis]) for grid in grids]) for axis in (0, 1))
        before, between, after = self.norms
        centred = pixels - mx.mean(pixels, axis=-1, keepdims=True)  # MLX's norm loses digits where a mean is far above the deviation
        x = between(self.dense(before(centred.astype(self.table.dtype))))
        x = after(x + self.table[column, 0] + self.table[row, 1])
        return Encoded(self.projection(mx.fast.rms_norm(x, None, self.eps)))


def load(config: Mapping[str, Any], weights: Weights) -> Gemma4PatchEmbedder:
    reader = VisionReader(config, "gemma4_unified_vision")
    patch = reader.side("patch_size", 16) * reader.integer("pooling_kernel_size", 3)
    hidden, table = reader.integer("mm_embed_dim", 3840), reader.integer("mm_posemb_size", 1120)
    eps = reader.number("rms_norm_eps", 1e-6)
    reader.only("output_proj_dims", hidden)
    reader.only("model_patch_size", patch)
    reader.skip("num_soft_tokens", "default_output_length")
    reader.finish()
    wide, text = 3 * patch**2, text_config_of(config).integer("hidden_size")
    name = prefix_of(weights, "patch_ln1.weight", *_BEFORE)
    embed = prefix_of(weights, "embedding_projection.weight", *_AFTER)
    norms = [("patch_ln1", wide), ("patch_ln2", hidden), ("pos_norm", hidden)]
    return Gemma4PatchEmbedder(
        patch,
        Linear.load(weights, f"{name}patch_dense", hidden, wide, bias=True),
        [LayerNorm.load_with_bias(weights, f"{name}{part}", size, _EPS) for part, size in norms],
        weights.vector(f"{name}pos_embedding", (table, 2, hidden)),
        Linear.load(weights, f"{embed}embedding_projection", text, hidden),
        eps,
    )
