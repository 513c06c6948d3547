"""InternVL: a ViT with a class token and layer scales on tiles, pixel shuffle, and an MLP.

Source: modeling_internvl.py of transformers (`internvl`), and modeling_intern_vit.py of OpenGVLab (`internvl_chat`), which has the same
maths under other names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from ...nn.linear import JoinedLinear, Linear
from ...nn.mlp import PlainMLP
from ...nn.norms import LayerNorm, RMSNorm
from ...nn.weights import Weights
from ...util.dataclass import dataclass
from ..config_reader import ConfigReader
from .parts import PatchAttention, VisionBlock, activation, load_patches, merge_squares, patch_rows
from .tower import Encoded, Size, Stages, Tower, VisionReader, prefix_of, text_config_of

_EPS = 1e-5
"""Of the projector's norm."""


@dataclass(frozen=True, slots=True)
class InternNames:
    """Names of tensors, under a prefix."""

    first: str
    """Class token."""
    positions: str
    patches: str
    layers: str
    attention: str
    output: str
    norms: tuple[str, str]
    scales: tuple[str, str]
    projector: tuple[str, str, str]
    """Norm and two products, under the projector's prefix."""


_HF = InternNames(
    "embeddings.cls_token",
    "embeddings.position_embeddings",
    "embeddings.patch_embeddings.projection",
    "encoder.layer",
    "attention",
    "attention.projection_layer",
    ("layernorm_before", "layernorm_after"),
    ("lambda_1", "lambda_2"),
    ("layer_norm", "linear_1", "linear_2"),
)
_ORIGINAL = InternNames(
    "embeddings.class_embedding",
    "embeddings.position_embedding",
    "embeddings.patch_embedding",
    "encoder.layers",
    "attn",
    "attn.proj",
    ("norm1", "norm2"),
    ("ls1", "ls2"),
    ("0", "1", "3"),
)


@dataclass(frozen=True, slots=True)
class InternSizes:
    """Sizes of the tower."""

    hidden: int
    inner: int
    """Channels inside the MLP."""
    layers: int
    heads: int
    eps: float
    activation: str
    bias: bool
    """True if queries, keys and values have biases."""
    norms_heads: bool
    """True if queries and keys are normed over their whole width."""
    rms: bool
    """True if norms do not subtract the mean."""
    image: int
    patch: int

    @classmethod
    def read(cls, reader: VisionReader) -> InternSizes:
        """Read either form of config; the defaults are those of its class."""
        hf = reader.values.get("model_type") == "internvl_vision"
        reader.only("num_channels", 3)
        reader.only("use_absolute_position_embeddings", True)
        reader.only("use_mask_token", False)
        reader.only("use_mean_pooling", True)
        reader.skip("layer_scale_init_value", "drop_path_rate", "qk_normalization", "use_qk_norm", "qkv_bias", "attention_bias")
        norm = reader.text("norm_type", "layer_norm" if hf else "rms_norm")
        if norm not in ("layer_norm", "rms_norm"):
            raise reader.bad("norm_type", norm, "layer_norm or rms_norm")
        hidden, heads = reader.integer("hidden_size", 1024 if hf else 3200), reader.count("num_attention_heads", 16 if hf else 25)
        if hidden % heads:
            raise reader.bad("num_attention_heads", heads, f"a divisor of hidden_size ({hidden})")
        return cls(
            hidden,
            reader.integer("intermediate_size", 4096 if hf else 12800),
            reader.count("num_hidden_layers", 24 if hf else 48),
            heads,
            reader.number("layer_norm_eps", 1e-6),
            reader.text("hidden_act", "gelu"),
            reader.boolean("attention_bias", False) if hf else reader.boolean("qkv_bias", False),
            reader.boolean("use_qk_norm", False) if hf else reader.boolean("qk_normalization", True),
            norm == "rms_norm",
            reader.side("image_size", 448 if hf else 224),
            reader.side("patch_size", 14),
        )

    def load_norm(self, weights: Weights, name: str) -> RMSNorm:
        if self.rms:
            return RMSNorm.load(weights, name, self.hidden, self.eps)
        return LayerNorm.load_with_bias(weights, name, self.hidden, self.eps)


@dataclass(frozen=True, slots=True)
class LayerScale:
    """Multiplies each channel."""

    scale: mx.array
    """`[hidden]`."""

    def __call__(self, y: mx.array) -> mx.array:
        return y * self.scale


@dataclass(frozen=True, slots=True)
class WideNorms:
    """Norms of queries and keys over all heads."""

    q_norm: RMSNorm
    k_norm: RMSNorm

    def __call__(self, q: mx.array, k: mx.array, v: mx.array) -> list[mx.array]:
        flat = (*q.shape[:2], -1)
        return [self.q_norm(q.reshape(flat)).reshape(q.shape), self.k_norm(k.reshape(flat)).reshape(k.shape), v]


class InternVLTower(Tower):
    """Takes tiles `[tiles, 3, side, side]`; each square of `merge * merge` patches becomes a row."""

    def __init__(
        self, patches: Linear, first: mx.array, table: mx.array, blocks: list[VisionBlock], projector: _Projector, patch: int, merge: int
    ) -> None:
        self.patches, self.first, self.table, self.blocks, self.projector = patches, first, table, blocks, projector
        self.patch, self.merge = patch, merge

    def stages(self, pixels: mx.array, sizes: Sequence[Size]) -> Stages:
        batch, side = pixels.shape[0], pixels.shape[2] // self.patch
        x = self.patches(patch_rows(pixels.astype(self.first.dtype), self.patch)).reshape(batch, side * side, -1)
        hidden = x.shape[-1]
        x = mx.concatenate([mx.broadcast_to(self.first, (batch, 1, hidden)), x], axis=1) + self.table.astype(x.dtype)
        x = x.reshape(-1, hidden)
        for block in self.blocks:
            x = block(x, batch)
            yield x
        rows = x.reshape(batch, -1, hidden)[:, 1:].reshape(-1, hidden)
        return Encoded(self.projector(merge_squares(rows, side, side, self.merge)))


@dataclass(frozen=True, slots=True)
class _Projector:
    norm: LayerNorm
    up: Linear
    down: Linear
    activation: Callable[[mx.array], mx.array]

    def __call__(self, x: mx.array) -> mx.array:
        return self.down(self.activation(self.up(self.norm(x))))


def load(config: Mapping[str, Any], weights: Weights) -> InternVLTower:
    reader = VisionReader(config, "internvl_vision", "intern_vit_6b", "siglip_vision_model")
    sizes = InternSizes.read(reader)
    reader.finish()
    outer = ConfigReader(config)
    outer.only("vision_feature_layer", -1)
    outer.only("select_layer", -1)
    outer.only("vision_feature_select_strategy", "default")
    outer.only("ps_version", "v2")
    ratio = outer.positive("downsample_ratio", 0.5)
    merge = int(1 / ratio)
    if (sizes.image // sizes.patch) % merge:
        raise outer.error("downsample_ratio", f"is {ratio}, which does not divide {sizes.image // sizes.patch} patches a side")
    act, text = activation(outer.text("projector_hidden_act", "gelu")), text_config_of(config).integer("hidden_size")
    name, names = _names(weights)
    projector = prefix_of(weights, f"{names.projector[0]}.weight", *_PROJECTORS[names is _HF])
    count, wide = (sizes.image // sizes.patch) ** 2 + 1, merge**2 * sizes.hidden
    return InternVLTower(
        load_patches(weights, f"{name}{names.patches}", sizes.hidden, sizes.patch),
        weights.vector(f"{name}{names.first}", (1, 1, sizes.hidden)),
        weights.vector(f"{name}{names.positions}", (1, count, sizes.hidden)),
        [_load_block(weights, f"{name}{names.layers}.{layer}", names, sizes) for layer in range(sizes.layers)],
        _Projector(
            LayerNorm.load_with_bias(weights, f"{projector}{names.projector[0]}", wide, _EPS),
            Linear.load(weights, f"{projector}{names.projector[1]}", text, wide, bias=True),
            Linear.load(weights, f"{projector}{names.projector[2]}", text, text, bias=True),
            act,
        ),
        sizes.patch,
        merge,
    )


_PROJECTORS = {True: ("multi_modal_projector.", "model.multi_modal_projector."), False: ("mlp1.", "model.mlp1.")}
"""Prefixes of the projector; True for transformers' names."""


def _names(weights: Weights) -> tuple[str, InternNames]:
    """Return the prefix and the names that the checkpoint has."""
    for prefix in ("vision_model.", "model.vision_model.", "vision_tower."):
        if weights.has(prefix + _ORIGINAL.first):
            return prefix, _ORIGINAL
    return prefix_of(weights, _HF.first, "vision_tower.", "model.vision_tower."), _HF


def _load_block(weights: Weights, name: str, names: InternNames, sizes: InternSizes) -> VisionBlock:
    hidden = sizes.hidden
    norms = [sizes.load_norm(weights, f"{name}.{part}") for part in names.norms]
    up = Linear.load(weights, f"{name}.mlp.fc1", sizes.inner, hidden, bias=True)
    down = Linear.load(weights, f"{name}.mlp.fc2", hidden, sizes.inner, bias=True)
    scales = [LayerScale(weights.vector(f"{name}.{part}", (hidden,))) for part in names.scales]
    mlp = PlainMLP(up, down, activation(sizes.activation))
    return VisionBlock(_load_attention(weights, name, names, sizes), mlp, (norms[0], norms[1]), (scales[0], scales[1]))


def _load_attention(weights: Weights, name: str, names: InternNames, sizes: InternSizes) -> PatchAttention:
    hidden, place = sizes.hidden, f"{name}.{names.attention}"
    if names is _HF:
        parts = [Linear.load(weights, f"{place}.{part}_proj", hidden, hidden, bias=sizes.bias) for part in "qkv"]
        qkv = JoinedLinear(parts, [hidden] * 3)
    else:
        qkv = JoinedLinear.fused(Linear.load(weights, f"{place}.qkv", 3 * hidden, hidden, bias=sizes.bias), [hidden] * 3)
    output = Linear.load(weights, f"{name}.{names.output}", hidden, hidden, bias=True)
    attention = PatchAttention(qkv, output, hidden // sizes.heads)
    if sizes.norms_heads:
        norms = [RMSNorm.load(weights, f"{place}.{part}", hidden, sizes.eps) for part in ("q_norm", "k_norm")]
        attention.norm_heads = WideNorms(norms[0], norms[1])
    return attention
