"""Sizes and layer types that all families' configs share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import UnsupportedModelError
from ..nn.attention import Heads
from ..util.dataclass import dataclass
from .config_reader import ConfigReader

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def read_layer_types(reader: ConfigReader, known: tuple[str, ...], count: int, rule: Callable[[int], str]) -> list[str]:
    """Return `layer_types`, or `rule` applied to each layer if the config lacks the key."""
    return reader.names("layer_types", known, count) or [rule(layer) for layer in range(count)]


def windows(types: list[str], window: int | None) -> list[int | None]:
    """Return the window of each layer in tokens, None for full attention. Raises `UnsupportedModelError`."""
    if window is None and SLIDING in types:
        raise UnsupportedModelError("config.json: layer_types has sliding_attention but sliding_window is not set")
    return [window if kind == SLIDING else None for kind in types]


def every(interval: int, nth: str, others: str) -> Callable[[int], str]:
    """Return a rule by which each `interval`-th layer is `nth` and the rest are `others`."""
    return lambda layer: others if (layer + 1) % interval else nth


@dataclass(frozen=True, slots=True)
class Sizes:
    """Counts and widths of a model."""

    vocab: int
    """Rows of the embedding."""
    hidden: int
    """Channels of the residual stream."""
    inner: int
    """Channels inside the feed-forward layer."""
    layers: int
    heads: Heads
    """Sizes of the attention layers."""
    eps: float
    positions: int
    """Context in tokens, before any rope scaling."""
    activation: str
    """Config name of the feed-forward layer's activation."""


def read_sizes(reader: ConfigReader, defaults: Mapping[str, Any], *, activation_key: str = "hidden_act") -> Sizes:
    """Read the sizes; `defaults` are the family's values of missing config keys. Raises `UnsupportedModelError`.

    Without a default, a missing or null `num_key_value_heads` is `num_attention_heads`, and `head_dim` is `hidden_size / heads`.
    """
    hidden = reader.integer("hidden_size", defaults["hidden_size"])
    count = reader.count("num_attention_heads", defaults["num_attention_heads"])
    kv = reader.optional_integer("num_key_value_heads", defaults.get("num_key_value_heads")) or count
    dim = reader.optional_integer("head_dim", defaults.get("head_dim")) or hidden // count
    if not 2 <= dim <= 1 << 16:
        raise UnsupportedModelError(f"config.json: attention heads of {dim} channels (head_dim, or hidden_size / num_attention_heads)")
    if count % kv:
        raise UnsupportedModelError(f"config.json: {count} attention heads cannot share {kv} key-value heads")
    reader.take("tie_word_embeddings")
    return Sizes(
        vocab=reader.integer("vocab_size", defaults["vocab_size"]),
        hidden=hidden,
        inner=reader.integer("intermediate_size", defaults["intermediate_size"]),
        layers=reader.count("num_hidden_layers", defaults["num_hidden_layers"]),
        heads=Heads(hidden, count, kv, dim),
        eps=reader.number("rms_norm_eps", defaults.get("rms_norm_eps", 1e-6)),
        positions=reader.integer("max_position_embeddings", defaults["max_position_embeddings"]),
        activation=reader.text(activation_key, defaults.get(activation_key, "silu")),
    )
