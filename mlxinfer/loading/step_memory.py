"""Upper bound on the transient memory of one step, from the shapes of the model's matrices."""

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
"""Bytes for indices, rotations, masks, and rounding by the allocator."""
_GPU_SLACK = 128 * 2**20
"""Bytes more on a GPU: Metal keeps what two command buffers use until they are done, about 50 MB each."""
_ROW_COPIES = 6
"""Copies of the widest row that are alive at once: the hidden state, its norm, a product, its activation, the sum, and one that waits to
be freed."""
_SAMPLING_STAGES = 16
"""float32 arrays `[rows, vocab]` that are alive at once when every sampling stage is used: 13 were measured, and sorting takes more."""
_PLAIN_COPIES = 3
"""Copies of a layer's keys, values and scores where MLX's own operations attend."""
_LAYER_ARRAYS = 64
"""Arrays that a layer creates in a step, at most."""
_MOST_EXPERTS = 16
"""Experts per token; only the matrices are known here, and few models choose more."""
_STEPS_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class StepSize:
    """Transient memory of one step."""

    fixed: int
    """Bytes whatever the context."""
    per_token: float
    """Bytes for each token of the longest sequence of the step."""
    arrays: int
    """Arrays alive at once, those of all steps in flight; a count."""

    def __add__(self, other: StepSize) -> StepSize:
        return StepSize(self.fixed + other.fixed, self.per_token + other.per_token, self.arrays + other.arrays)


def step_size(model: Model, dtype: mx.Dtype, kv: KVFormat, rows: int, sampled: int) -> StepSize:
    """The largest step: `rows` tokens, of which `sampled` at most are followed by a sampled one."""
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
    """Whether its products have a row for each token of the step. The logits have one for each that is sampled."""
    return not isinstance(node, Embedding) and _width(node) != model.vocab_size


def _width(node: Linear | Embedding) -> int:
    """Columns of its wider side, input or output."""
    return int(max(node.matrix.shape[-2:]))


def _state(spec: RecurrentSpec) -> int:
    return sum(prod(shape) for shape in spec.shapes) * mx.float32.size


def _unpacked(node: Linear | Embedding, dtype: mx.Dtype) -> int:
    """Bytes of a matrix that is unpacked for its product: raw GGUF blocks, where the kernels for them are missing."""
    if isinstance(node.matrix, RawBlocks) and not kernels_cpu.in_use():
        return prod(tuple(node.matrix.shape)) * dtype.size
    return 0


def _attention(spec: AttentionSpec, dtype: mx.Dtype, kv: KVFormat, rows: int) -> float:
    """Bytes per token of context in one layer; layers are computed one after another."""
    if not isinstance(attention_backend(LayerStore(spec, dtype, kv)), PlainAttention):
        return 0.0
    size = mx.float32.size if kv.quantized else dtype.size
    pairs = spec.kv_heads * (spec.key_dim + spec.value_dim) * size
    scores = max(spec.query_heads, spec.kv_heads) * rows * mx.float32.size
    return float(_PLAIN_COPIES * (pairs + scores))


def kept_arrays(model: Model) -> Iterator[int]:
    """For each layer, how many arrays its pools have: codes and scales of keys and values, first pages, open pages; or states."""
    for spec in model.layers:
        yield 8 if isinstance(spec, AttentionSpec) else len(spec.shapes) if isinstance(spec, RecurrentSpec) else 2
