"""Gemma 3: SigLIP on squares of one size, an average pool, a norm and one product.

Source: modeling_gemma3.py of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any

import mlx.core as mx

from ...nn.linear import Linear
from ...nn.norms import RMSNorm
from ...nn.weights import Dense, Matrix, Recipe, Weights
from ..config_reader import ConfigReader
from .parts import load_patches, load_table, patch_rows
from .siglip import SiglipEncoder, SiglipSizes
from .tower import Encoded, Size, Stages, Tower, VisionReader, prefix_of, text_config_of

_PREFIXES = ("vision_tower.vision_model.", "model.vision_tower.vision_model.", "model.vision_tower.", "vision_tower.")


class Gemma3Tower(Tower):
    """Takes squares `[images, 3, side, side]`; each square of `pool * pool` patches becomes a row."""

    def __init__(
        self, patches: Linear, table: mx.array, encoder: SiglipEncoder, norm: RMSNorm, projection: Linear, patch: int, pool: int
    ) -> None:
        self.patches, self.table, self.encoder, self.norm, self.projection = patches, table, encoder, norm, projection
        self.patch, self.pool = patch, pool

    def stages(self, pixels: mx.array, sizes: Sequence[Size]) -> Stages:
        batch, side, pool = pixels.shape[0], pixels.shape[2] // self.patch, self.pool
        x = self.patches(patch_rows(pixels.astype(self.norm.weight.dtype), self.patch))
        x = x.reshape(batch, side * side, -1) + self.table.astype(x.dtype)
        x = yield from self.encoder.stages(x.reshape(batch * side * side, -1), batch)
        squares = x.reshape(batch, side // pool, pool, side // pool, pool, -1).astype(mx.float32)
        pooled = squares.mean(axis=(2, 4)).reshape(-1, x.shape[-1])
        return Encoded(self.projection(self.norm(pooled.astype(x.dtype))))


def load(config: Mapping[str, Any], weights: Weights) -> Gemma3Tower:
    reader = VisionReader(config, "siglip_vision_model")
    sizes = SiglipSizes.read(reader)
    image, patch = reader.side("image_size", 224), reader.side("patch_size", 16)
    reader.finish()
    side, tokens = image // patch, isqrt(ConfigReader(config).integer("mm_tokens_per_image", 256))
    if side % tokens:
        raise reader.error("image_size", f"gives {side} patches a side, which must be a multiple of {tokens} (mm_tokens_per_image)")
    text = text_config_of(config).integer("hidden_size")
    name = prefix_of(weights, "post_layernorm.weight", *_PREFIXES)
    projector = prefix_of(weights, "mm_soft_emb_norm.weight", "multi_modal_projector.", "model.multi_modal_projector.")
    return Gemma3Tower(
        load_patches(weights, f"{name}embeddings.patch_embedding", sizes.hidden, patch),
        load_table(weights, f"{name}embeddings.position_embedding.weight", side**2, sizes.hidden),
        SiglipEncoder.load(weights, name, sizes),
        RMSNorm.load(weights, f"{projector}mm_soft_emb_norm", sizes.hidden, sizes.eps, centred=True),
        _load_projection(weights, f"{projector}mm_input_projection_weight", text, sizes.hidden),
        patch,
        side // tokens,
    )


def _load_projection(weights: Weights, name: str, text: int, hidden: int) -> Linear:
    """Load a matrix that is stored as `[hidden, text]`."""

    def transposed(sources: list[Matrix]) -> Matrix:
        if not isinstance(sources[0], Dense):
            raise ValueError("it is quantized along the wrong axis")
        return Dense(sources[0].weight.T)

    recipe = Recipe((name,), ((hidden, text),), transposed)
    return Linear(weights.matrix(name, (text, hidden), otherwise=[recipe], quantizable=False))
