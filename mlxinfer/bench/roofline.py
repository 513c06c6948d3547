"""Lower bounds of the bytes and operations of a step, from the sizes of the model.

Counted are the weights, read once per step, keys, values and states, and the operations (two per multiply-add) of matrix products and
attention. Activations, which stay in the processor's caches, and elementwise operations are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..cache.base import PAGE, AttentionSpec
from ..cache.kv_format import KVFormat
from ..cache.store import LayerStore
from ..loading.memory.step import state_bytes
from ..models.decoder import Decoder, Model
from ..models.vlm_text import integer_setting
from ..nn.linear import Embedding, Linear
from ..nn.moe import Experts, PlainExperts
from ..nn.packing import arrays, objects


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes and operations of some work."""

    bytes: float = 0.0
    """Bytes read and written in memory."""
    operations: float = 0.0
    """Multiplications and additions."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.operations + other.operations)

    def times(self, count: float) -> Cost:
        return Cost(self.bytes * count, self.operations * count)


@dataclass(frozen=True, slots=True)
class WeightSize:
    """Size of a part of the model."""

    nbytes: int
    """Bytes as stored."""
    parameters: int
    """Parameters by which a token is multiplied."""

    @classmethod
    def of(cls, part: object) -> WeightSize:
        shapes = [node.matrix.shape for node in objects(part) if isinstance(node, (Linear, Embedding))]
        return cls(sum(array.nbytes for array in arrays(part)), sum(map(math.prod, shapes)))


@dataclass(frozen=True, slots=True)
class _Attention:
    """Sizes of an attention layer."""

    window: int | None
    """Tokens that a token attends to; None for all before it."""
    token_bytes: float
    """Bytes of a token's keys and values."""
    pair_operations: int
    """Operations per pair of a token and one that it attends to."""

    def step(self, past: int, count: int) -> Cost:
        """Cost of `count` tokens after `past` others: attended tokens are read once, new ones written."""
        read = past if self.window is None else min(past, self.window - 1)
        pairs = self._pairs(past + count) - self._pairs(past)
        return Cost((read + count) * self.token_bytes, pairs * self.pair_operations)

    def _pairs(self, length: int) -> int:
        """Number of pairs of the first `length` tokens, each with itself included."""
        growing = length if self.window is None else min(length, self.window)
        return growing * (growing + 1) // 2 + (length - growing) * growing


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes of a model that determine its costs."""

    body: WeightSize
    """Parts that every token goes through."""
    head: WeightSize
    """The head, or the embedding in its place."""
    experts: WeightSize
    """All experts together."""
    chosen: float
    """Share of the experts that a token goes through."""
    attention: tuple[_Attention, ...]
    """Layers with keys and values."""
    state_bytes: int
    """Bytes of a sequence's recurrent states."""

    def decode(self, depth: int, streams: int) -> Cost:
        """Cost of a step of `streams` sequences, each with `depth` tokens in the cache."""
        own = sum((layer.step(depth, 1) for layer in self.attention), Cost(2 * self.state_bytes))
        return self._weights(streams, rows=streams) + own.times(streams)

    def prefill(self, tokens: int, chunk: int) -> Cost:
        """Cost of all steps of one prompt, `chunk` tokens in each; logits are computed once."""
        total = Cost()
        for past in range(0, tokens, chunk):
            count = min(chunk, tokens - past)
            own = sum((layer.step(past, count) for layer in self.attention), Cost(2 * self.state_bytes))
            total += self._weights(count, rows=int(past + count == tokens)) + own
        return total

    def _weights(self, tokens: int, *, rows: int) -> Cost:
        """Matrix products of a step with `tokens` tokens, `rows` of which have logits."""
        touched = 1 - (1 - self.chosen) ** tokens
        nbytes = self.body.nbytes + self.experts.nbytes * touched + (self.head.nbytes if rows else 0)
        parameters = tokens * (self.body.parameters + self.experts.parameters * self.chosen) + rows * self.head.parameters
        return Cost(nbytes, 2.0 * parameters)


def footprint(model: Model, config: Mapping[str, Any], dtype: mx.Dtype, kv: KVFormat | None = None) -> Footprint | None:
    """Sizes of a model; None for mlx-lm's graphs. Experts are assumed to be chosen evenly."""
    if not isinstance(model, Decoder):
        return None
    experts = WeightSize.of(_experts(model))
    blocks, norm = WeightSize.of(model.blocks), WeightSize.of(model.norm)
    return Footprint(
        body=WeightSize(blocks.nbytes + norm.nbytes - experts.nbytes, blocks.parameters - experts.parameters),
        head=WeightSize.of(model.head or model.embedding),
        experts=experts,
        chosen=_chosen_share(model, config),
        attention=tuple(_attention(spec, config, dtype, kv) for spec in model.layers if isinstance(spec, AttentionSpec)),
        state_bytes=sum(state_bytes(spec) for spec in model.layers),
    )


def _attention(spec: AttentionSpec, config: Mapping[str, Any], dtype: mx.Dtype, kv: KVFormat | None) -> _Attention:
    found = integer_setting(config, "num_attention_heads")
    heads = spec.kv_heads if found is None else found
    return _Attention(spec.window, LayerStore.page_bytes(spec, dtype, kv) / PAGE, 2 * heads * (spec.key_dim + spec.value_dim))


def _chosen_share(model: Decoder, config: Mapping[str, Any]) -> float:
    counts = [experts.down.matrix.shape[0] for experts in _experts(model)]
    if not counts:
        return 0.0
    chosen = integer_setting(config, "num_experts_per_tok")
    return min((counts[0] if chosen is None else chosen) / counts[0], 1.0)


def _experts(model: Decoder) -> list[Experts | PlainExperts]:
    return [node for node in objects(model.blocks) if isinstance(node, (Experts, PlainExperts))]
