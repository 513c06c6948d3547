"""Idefics 3 and SmolVLM: SigLIP on tiles, bucketed positions, pixel shuffle and one product.

Source: modeling_idefics3.py and modeling_smolvlm.py of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ...nn.linear import Linear
from ...nn.weights import Weights
from ..config_reader import ConfigReader
from .parts import Ints, load_patches, load_table, merge_squares, patch_rows
from .siglip import SiglipEncoder, SiglipSizes
from .tower import Encoded, Size, Stages, Tower, VisionReader, prefix_of, text_config_of


class Idefics3Tower(Tower):
    """Takes tiles `[tiles, 3, height, width]`; `scale * scale` neighbouring patches become a row."""

    def __init__(self, patches: Linear, table: mx.array, encoder: SiglipEncoder, projection: Linear, patch: int, scale: int) -> None:
        self.patches, self.table, self.encoder, self.projection = patches, table, encoder, projection
        self.patch, self.scale = patch, scale

    def stages(self, pixels: mx.array, sizes: Sequence[Size]) -> Stages:
        batch, rows, columns = pixels.shape[0], pixels.shape[2] // self.patch, pixels.shape[3] // self.patch
        places = mx.array(_places(rows, columns, round(self.table.shape[0] ** 0.5)))
        x = self.patches(patch_rows(pixels.astype(self.encoder.norm.weight.dtype), self.patch))
        x = x.reshape(batch, rows * columns, -1) + self.table[places].astype(x.dtype)
        x = yield from self.encoder.stages(x.reshape(batch * rows * columns, -1), batch)
        return Encoded(self.projection(merge_squares(x, rows, columns, self.scale)))


def _places(rows: int, columns: int, side: int) -> Ints:
    """Return the row of the table of each patch: its place in the image, as a fraction, in a grid of `side * side`."""
    boundaries = np.arange(1 / side, 1.0, 1 / side).astype(np.float32)

    def buckets(count: int) -> Ints:
        fractions = np.arange(count, dtype=np.float32) * np.float32(1 / count)
        return np.asarray(np.searchsorted(boundaries, np.minimum(fractions, np.float32(1 - 1e-6)), side="right"))

    return (buckets(rows)[:, None] * side + buckets(columns)).reshape(-1)


def load(config: Mapping[str, Any], weights: Weights) -> Idefics3Tower:
    reader = VisionReader(config, "idefics3", "idefics3_vision", "smolvlm", "smolvlm_vision")
    sizes = SiglipSizes.read(reader, hidden=1152, heads=16)
    image, patch = reader.side("image_size", 224), reader.side("patch_size", 32)
    reader.skip("size", "max_image_size", "use_base_siglip", "tie_word_embeddings")
    reader.finish()
    scale = ConfigReader(config).integer("scale_factor", 2)
    text = text_config_of(config).integer("hidden_size")
    name = prefix_of(weights, "post_layernorm.weight", "model.vision_model.", "vision_model.")
    connector = prefix_of(weights, "modality_projection.proj.weight", "model.connector.", "connector.")
    return Idefics3Tower(
        load_patches(weights, f"{name}embeddings.patch_embedding", sizes.hidden, patch),
        load_table(weights, f"{name}embeddings.position_embedding.weight", (image // patch) ** 2, sizes.hidden),
        SiglipEncoder.load(weights, name, sizes),
        Linear.load(weights, f"{connector}modality_projection.proj", text, sizes.hidden * scale**2),
        patch,
        scale,
    )
