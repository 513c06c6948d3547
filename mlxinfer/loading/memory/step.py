"""Upper bounds on the memory that a model and one of its steps need, from the shapes of its matrices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Protocol

import mlx.core as mx

from ... import kernels_cpu
from ...cache.attention.reference_chunks import PlainSize, rows_at_once
from ...cache.attention.select import attention_backend
from ...cache.base import PAGE, AttentionParams, AttentionSpec, BidirectionalSpec, LayerSpec, RecurrentSpec
from ...cache.kv_format import KVFormat
from ...cache.paged import PagedCache
from ...cache.pages import pages_for
from ...cache.store import LayerStore
from ...kernels_metal.quantized_matmul.block_formats import BLOCKS
from ...models.decoder import Model
from ...nn.latent_attention import LatentAttention
from ...nn.linear import Embedding, Linear
from ...nn.mamba2 import Mamba2
from ...nn.moe import ExpertLinear
from ...nn.packing import arrays, objects
from ...nn.small_batch_matmul import UNPACKED_BYTES
from ...nn.weights import Blocks, RawBlocks
from ...sampling import SAMPLED_ROWS_AT_ONCE
from ...util.dataclass import dataclass
from ...util.device import command_buffer_numbers, is_gpu

_SLACK = 16 * 2**20
"""Bytes for indices, rotations, masks, and rounding by the allocator."""
_ROW_COPIES = 6
"""Copies of the widest row that are alive at once: the hidden state, its norm, a product, its activation, the sum, and one waiting to be
freed."""
_LOGIT_COPIES = 3
"""Float32 logits `[rows, vocab]` that are alive at once: those of the step, their input, and those of the step before."""
_SAMPLING_STAGES = 16
"""Float32 arrays `[rows, vocab]` that are alive at once with every sampling stage: 13 were measured, and sorting takes more."""
_BATCH_ARRAYS = 4
"""Float32 arrays `[sequences, vocab]` of a batch's penalties and biases."""
_SCORING_COPIES = 5
"""As `_LOGIT_COPIES`, for scored rows of a prompt: of this step, and of the one before, whose log-probabilities are computed."""
_STATE_COPIES = 3
"""States of a recurrent layer that are alive at once: old, gathered for the step, and updated."""
_SCORE_COPIES = 3
"""Scores of whole texts, masked scores, and their softmax."""
_MASK_ARRAYS = 3
"""Arrays of 4 bytes per score of one head that make up a mask."""
_LAYER_ARRAYS = 64
"""Maximum number of arrays that a layer creates in a step."""
_MOST_EXPERTS = 16
"""Assumed maximum of experts per token: only the matrices are known here."""
_STEPS_IN_FLIGHT = 2
_OPEN_PAGES_IN_FLIGHT = 1.5
"""Open pages of a sequence that a step on a GPU rewrites: a copy if MLX cannot write in place, and 16 recent rows, old and new."""
_SLICES = 2
"""Slices of a matrix of blocks that are unpacked at once."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """Transient memory of one step."""

    fixed: int
    """Bytes that do not depend on the context."""
    attention: tuple[tuple[PlainSize, ...], ...]
    """For each model, the parts that grow with the context. One layer at a time is computed."""
    grown: float
    """Bytes per token of the page pool, while it grows between two steps."""
    arrays: int
    """Count of arrays alive at once, in all steps in flight."""

    def __add__(self, other: StepSize) -> StepSize:
        return StepSize(self.fixed + other.fixed, self.attention + other.attention, self.grown + other.grown, self.arrays + other.arrays)

    def at(self, context: int, sequences: int = 1) -> int:
        """Bytes for `sequences` sequences of `context` tokens."""
        return self.fixed + sum(max((size.bytes(context, sequences) for size in sizes), default=0) for sizes in self.attention)

    def growth(self, context: int, sequences: int, pool_tokens: int) -> int:
        """Bytes beyond those of a step while the pool grows to this size."""
        return max(int(self.grown * pool_tokens) - self.at(context, sequences), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """The rows of the largest step."""

    rows: int
    sequences: int
    drafts: int
    """Maximum number of drafted tokens per sequence."""
    scored: int = 0
    """Maximum number of scored rows of prompts."""
    span: int = 0
    """Maximum rows of an image that see one another, if the model sees images."""

    @property
    def sampled(self) -> int:
        """Maximum number of rows that a sampled token follows."""
        return min(self.sequences * (1 + self.drafts), self.rows)


class Planned(Protocol):
    """A model that is loaded or prepared."""

    @property
    def model(self) -> Model: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def load_bytes(self) -> int:
        """Bytes needed besides the weights while they are read."""
        ...

    @property
    def dtype(self) -> mx.Dtype: ...


@dataclass(frozen=True, slots=True)
class Demands:
    """Memory that a model, or a model and its draft model, need. Bytes, unless a field says otherwise."""

    weights: int
    load: int
    """Needed besides the weights while they are read."""
    step: StepSize
    """Peak of a step."""
    token: float
    """For each token of context, in layers without a window."""
    window_token: float
    """For each token kept for reuse, in layers with a window."""
    sequence: int
    """For each running sequence, whatever its length."""
    recurrent: bool
    """True if a layer has a state that changes with every token."""
    arrays: int
    """Count of arrays besides snapshots that can be alive at once."""

    def __add__(self, other: Demands) -> Demands:
        return Demands(
            self.weights + other.weights,
            max(self.load, other.load),
            self.step + other.step,
            self.token + other.token,
            self.window_token + other.window_token,
            self.sequence + other.sequence,
            self.recurrent or other.recurrent,
            self.arrays + other.arrays,
        )


def demands_of(planned: Planned, kv: KVFormat, step: StepRows, weights: int) -> Demands:
    """Compute the demands of a model whose weights, with adapters, take `weights` bytes."""
    layers, dtype = planned.model.layers, planned.dtype
    windows = [s for s in layers if isinstance(s, AttentionSpec) and s.window is not None]
    states = sum(map(state_bytes, layers))
    opened = PagedCache.sequence_bytes(layers, dtype, kv)
    if is_gpu():  # while a step is in flight, open pages and their recent rows exist twice
        opened += int(_OPEN_PAGES_IN_FLIGHT * PagedCache.sequence_bytes(layers, dtype))
    held = sum(LayerStore.page_bytes(s, dtype, kv) * pages_for(2**31, s.window, step.rows) for s in windows)
    size = step_size(planned.model, dtype, kv, step)
    return Demands(
        weights=weights,
        load=planned.load_bytes,
        step=size,
        token=PagedCache.token_bytes(layers, dtype, kv),
        window_token=PagedCache.reuse_bytes(layers, dtype, kv),
        sequence=opened + states + held,
        recurrent=bool(states),
        arrays=weight_arrays(planned.model) + sum(kept_arrays(planned.model)) + size.arrays,
    )


def step_size(model: Model, dtype: mx.Dtype, kv: KVFormat, step: StepRows) -> StepSize:
    """Compute the size of a model's largest step."""
    nodes = list(objects(model))
    linears = [node for node in nodes if isinstance(node, (Linear, Embedding))]
    softcap = any(node.softcap is not None for node in nodes if isinstance(node, AttentionParams))
    attention = [spec for spec in model.layers if isinstance(spec, AttentionSpec)]
    stores = [LayerStore(spec, dtype, kv) for spec in attention]
    plain = [size for store in stores for size in _reference_attention(store, step, softcap=softcap)]
    plain += _head_attention(model, dtype, kv, step)
    unsealed = max((attention_backend(store).unsealed_bytes(store, step.rows) for store in stores), default=0)
    windowed = [(size, size.spec.window) for size in plain if size.spec.window is not None]
    windows = max((size.bytes(window + step.rows, step.sequences) for size, window in windowed), default=0)
    activations = _ROW_COPIES * step.rows * _widest_row(model, nodes, linears) * mx.float32.size
    unpacked = max((unpacked_bytes(node, dtype) for node in linears), default=0)
    layers = max(len(model.layers), 1)
    return StepSize(
        _slack_bytes(dtype)
        + activations
        + windows
        + unsealed
        + unpacked
        + _logit_bytes(model, step)
        + _recurrent_bytes(model, step)
        + _whole_text_bytes(model, step),
        (tuple(dict.fromkeys(size for size in plain if size.spec.window is None)),),
        max((growth(spec, dtype, kv) for spec in attention if spec.window is None), default=0.0),
        _STEPS_IN_FLIGHT * layers * _LAYER_ARRAYS,
    )


def with_scored(model: Model, step: StepRows, room: int, least: int) -> StepRows:
    """Set the scored rows: as many as fit in `room` bytes or in the memory of sampling, and at least `least`."""
    row = _SCORING_COPIES * model.vocab_size * mx.float32.size
    return replace(step, scored=min(max(max(_logit_bytes(model, step), room) // row, least), step.rows))


def _slack_bytes(dtype: mx.Dtype) -> int:
    """Bytes for small arrays and, on a GPU, for one command buffer.

    A GPU frees memory when a command buffer is done. If memory is short, MLX waits for earlier buffers, but not for the one it fills.
    """
    return _SLACK + (command_buffer_numbers() * dtype.size if is_gpu() else 0)


def weight_arrays(model: Model) -> int:
    return sum(1 for _ in arrays(model))


def _widest_row(model: Model, nodes: list[object], linears: list[Linear | Embedding]) -> int:
    """Numbers in the widest row of a step's activations."""
    by_head = {id(linear): node.sizes.heads for node in nodes if isinstance(node, LatentAttention) for linear in (node.into, node.out)}
    wide = [_width(n) * by_head.get(id(n), _MOST_EXPERTS if isinstance(n, ExpertLinear) else 1) for n in linears if _is_inner(n, model)]
    wide += [node.sizes.heads * node.sizes.state for node in nodes if isinstance(node, Mamba2)]
    return max(wide, default=0)


def _is_inner(node: Linear | Embedding, model: Model) -> bool:
    """True if its product has a row for each token of the step. Logits have a row for each sampled token."""
    return not isinstance(node, Embedding) and _width(node) != model.vocab_size


def _width(node: Linear | Embedding) -> int:
    """Columns of the wider side, input or output."""
    return int(max(node.matrix.shape[-2:]))


def _logit_bytes(model: Model, step: StepRows) -> int:
    """Bytes of the logits and sampling stages of all sampled rows and of the batch's arrays, or of the scored rows if more."""
    rows = _LOGIT_COPIES * step.sampled + _SAMPLING_STAGES * min(step.sampled, SAMPLED_ROWS_AT_ONCE) + _BATCH_ARRAYS * step.sequences
    return max(rows, _SCORING_COPIES * step.scored) * model.vocab_size * mx.float32.size


def _recurrent_bytes(model: Model, step: StepRows) -> int:
    """Bytes of recurrent states: one layer's while it is computed, and a copy of all layers' for sequences whose drafts may be rejected."""
    sizes = [state_bytes(spec) for spec in model.layers]
    return step.sequences * (_STATE_COPIES * max(sizes, default=0) + (sum(sizes) if step.drafts else 0))


def state_bytes(spec: LayerSpec) -> int:
    """Bytes of a layer's recurrent states for one sequence."""
    return sum(prod(shape) for shape in spec.shapes) * mx.float32.size if isinstance(spec, RecurrentSpec) else 0


def _whole_text_bytes(model: Model, step: StepRows) -> int:
    """Bytes of the scores of bidirectional layers, and of two masks with their distances."""
    heads = max((spec.query_heads for spec in model.layers if isinstance(spec, BidirectionalSpec)), default=0)
    if not heads:
        return 0
    scores = heads * rows_at_once(heads, step.rows, step.rows, fused=False) * step.rows
    return mx.float32.size * (_SCORE_COPIES * scores + _MASK_ARRAYS * step.rows**2)


def unpacked_bytes(node: Linear | Embedding, dtype: mx.Dtype) -> int:
    """Bytes of GGUF blocks that are unpacked for a product.

    On a GPU, products of many rows unpack slices: one is multiplied while the next is unpacked. A CPU without kernels unpacks the whole
    matrix.
    """
    matrix = node.matrix
    if not isinstance(matrix, (Blocks, RawBlocks)) or (isinstance(matrix, RawBlocks) and kernels_cpu.in_use()):
        return 0
    size = prod(tuple(matrix.shape)) * dtype.size
    sliced = isinstance(matrix, Blocks) or (is_gpu() and matrix.format.mode in BLOCKS)
    return min(size, _SLICES * UNPACKED_BYTES) if sliced else size


def _reference_attention(store: LayerStore, step: StepRows, *, softcap: bool) -> Iterator[PlainSize]:
    """Memory of plain MLX for the attention of a layer, if it computes at least some segments: all, large ones, or those with spans."""
    rows = step.rows if attention_backend(store).joins_past(store) else step.span if store.spec.sees_spans else 0
    if rows:
        yield PlainSize(store.spec, rows, store.dtype.size, store.format.quantized, softcap)


def _head_attention(model: Model, dtype: mx.Dtype, kv: KVFormat, step: StepRows) -> Iterator[PlainSize]:
    """Memory of a draft head that reads the model's pages, one row per sequence."""
    for layer in model.mtp.reads if model.mtp is not None else ():
        spec = model.layers[layer]
        assert isinstance(spec, AttentionSpec)
        yield PlainSize(spec, step.sequences, dtype.size, kv.quantized, False)


def growth(spec: AttentionSpec, dtype: mx.Dtype, kv: KVFormat) -> float:
    """Bytes per token of one layer's pool while it grows: the old pool and the new rows exist besides the new pool, one layer at a time."""
    return LayerStore.page_bytes(spec, dtype, kv) / PAGE


def kept_arrays(model: Model) -> Iterator[int]:
    """Number of arrays in each layer's pools: codes and scales of keys and values, first pages, open pages; or states."""
    for spec in model.layers:
        yield 8 if isinstance(spec, AttentionSpec) else len(spec.shapes) if isinstance(spec, RecurrentSpec) else 2
