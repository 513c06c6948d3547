"""What a step needs beside what stays: an upper bound of its activations, from the sizes of the model's matrices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import mlx.core as mx

from .. import kernels_cpu
from ..cache.attention.reference import PlainAttention
from ..cache.attention.select import attention_backend
from ..cache.base import AttentionSpec, RecurrentSpec
from ..cache.kv_format import KVFormat
from ..cache.store import LayerStore
from ..device import is_gpu
from ..models.decoder import Model
from ..nn.linear import Embedding, Linear
from ..nn.moe import Experts
from ..nn.packing import arrays, objects
from ..nn.weights import RawBlocks

_SLACK = 16 * 2**20
"""Indices, rotations, masks, and what allocating rounds up."""
_GPU_SLACK = 128 * 2**20
"""Metal keeps what two command buffers use until they are done, each of some 50 MB."""
_ROW_COPIES = 6
"""Of the widest row and of the hidden state that are alive at once: the state, its norm, a product, its activation, the sum, and one
that waits to be freed."""
_SAMPLING_STAGES = 16
"""Arrays `[rows, vocab]` of 4 bytes that are alive at once where every stage is used; 13 are measured, sorting takes more."""
_PLAIN_COPIES = 3
"""Of a layer's keys and values, and of the scores, where MLX's own operations attend."""
_LAYER_ARRAYS = 64
"""Arrays that a layer makes in a step, at most."""
_MOST_EXPERTS = 16
"""Experts of a token, where only their matrices are known: hardly a model chooses more."""
_STEPS_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class StepSize:
    """`fixed` bytes whatever the context, and as many more as the longest sequence of the step has tokens times `per_token`.
    `arrays` are alive at once, those of steps in flight."""

    fixed: int
    per_token: float
    arrays: int

    def __add__(self, other: StepSize) -> StepSize:
        return StepSize(self.fixed + other.fixed, self.per_token + other.per_token, self.arrays + other.arrays)


def step_size(model: Model, dtype: mx.Dtype, kv: KVFormat, rows: int, sampled: int) -> StepSize:
    """Of `rows` tokens, of which `sampled` get the next one chosen, at most."""
    nodes = [node for node in objects(model) if isinstance(node, (Linear, Embedding, Experts))]
    linears = [node for node in nodes if isinstance(node, (Linear, Embedding))]
    in_experts = {id(node) for experts in nodes if isinstance(experts, Experts) for node in objects(experts)}
    wide = max((_width(n) * (_MOST_EXPERTS if id(n) in in_experts else 1) for n in linears if _is_inner(n, model)), default=0)
    attention = [spec for spec in model.layers if isinstance(spec, AttentionSpec)]
    windows = max((_attention(s, dtype, kv, rows) * (s.window + rows) for s in attention if s.window is not None), default=0.0)
    states = sum(_state(spec) for spec in model.layers if isinstance(spec, RecurrentSpec))
    activations = _ROW_COPIES * rows * wide * mx.float32.size
    unpacked = max((_unpacked(node, dtype) for node in linears), default=0)
    logits = _SAMPLING_STAGES * sampled * model.vocab_size * mx.float32.size
    layers = max(len(model.layers), 1)
    return StepSize(
        _SLACK + (_GPU_SLACK if is_gpu() else 0) + activations + int(windows) + unpacked + logits + states,
        max((_attention(s, dtype, kv, rows) for s in attention if s.window is None), default=0.0),
        _STEPS_IN_FLIGHT * layers * _LAYER_ARRAYS,
    )


def weight_arrays(model: Model) -> int:
    return sum(1 for _ in arrays(model))


def _is_inner(node: Linear | Embedding, model: Model) -> bool:
    """Whether its products are rows of the step, and not logits of the few that are sampled."""
    return not isinstance(node, Embedding) and _width(node) != model.vocab_size


def _width(node: Linear | Embedding) -> int:
    """Of a row that goes in or comes out."""
    return int(max(node.matrix.shape[-2:]))


def _state(spec: RecurrentSpec) -> int:
    return sum(prod(shape) for shape in spec.shapes) * mx.float32.size


def _unpacked(node: Linear | Embedding, dtype: mx.Dtype) -> int:
    """Bytes of a matrix that MLX multiplies with unpacked: blocks of a GGUF file without the kernels for them."""
    if isinstance(node.matrix, RawBlocks) and not kernels_cpu.in_use():
        return prod(tuple(node.matrix.shape)) * dtype.size
    return 0


def _attention(spec: AttentionSpec, dtype: mx.Dtype, kv: KVFormat, rows: int) -> float:
    """Bytes for each token that is seen, in one layer; layers are computed one after another."""
    if not isinstance(attention_backend(LayerStore(spec, dtype, kv)), PlainAttention):
        return 0.0
    size = mx.float32.size if kv.quantized else dtype.size
    pairs = spec.kv_heads * (spec.key_dim + spec.value_dim) * size
    scores = max(spec.query_heads, spec.kv_heads) * rows * mx.float32.size
    return float(_PLAIN_COPIES * (pairs + scores))


def kept_arrays(model: Model) -> Iterator[int]:
    """For each layer, the arrays that its pools are: codes and scales of keys and values, first pages, open pages; or states."""
    for spec in model.layers:
        yield 8 if isinstance(spec, AttentionSpec) else len(spec.shapes) if isinstance(spec, RecurrentSpec) else 2
