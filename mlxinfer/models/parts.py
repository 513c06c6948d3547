"""Parts that several families build alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..cache.base import AttentionSpec
from ..nn.activations import Gate
from ..nn.mlp import GatedMLP
from ..nn.norms import RMSNorm
from ..nn.weights import Weights
from .block import Block, FeedForward, Mixer, Norms
from .config import ConfigReader
from .sizes import Sizes


def attention_specs(sizes: Sizes, windows: Sequence[int | None]) -> tuple[AttentionSpec, ...]:
    """Keys and values of every layer, each with its window."""
    heads = sizes.heads
    return tuple(AttentionSpec(heads.kv, heads.dim, heads.dim, window, heads.count) for window in windows)


def pre_norm(
    weights: Weights,
    name: str,
    sizes: Sizes,
    mixer: Mixer,
    mlp: FeedForward,
    *,
    rope: str | None = "rope",
    residual: float = 1.0,
) -> Block:
    """The usual block: a norm before the mixer and one before the MLP."""
    norms = Norms(
        before_mixer=RMSNorm.load(weights, f"{name}.input_layernorm", sizes.hidden, sizes.eps),
        before_mlp=RMSNorm.load(weights, f"{name}.post_attention_layernorm", sizes.hidden, sizes.eps),
    )
    return Block(mixer, mlp, norms, rope, residual)


def gated_mlp(weights: Weights, name: str, sizes: Sizes, gate: Gate, *, bias: bool = False) -> GatedMLP:
    return GatedMLP.load(weights, f"{name}.mlp", sizes.hidden, sizes.inner, gate, bias=bias)


def is_sparse_layer(reader: ConfigReader, experts: int) -> Callable[[int], bool]:
    """Which layers have experts, by `decoder_sparse_step` and `mlp_only_layers`."""
    interval = reader.integer("decoder_sparse_step", 1)
    dense = reader.integers("mlp_only_layers") or []
    return lambda layer: experts > 0 and layer not in dense and (layer + 1) % interval == 0
