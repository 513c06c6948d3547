"""The memory plan, made before a weight is read: weights, the cache, a step, and what is kept for reuse."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Protocol

import mlx.core as mx

from ..cache.base import PAGE, AttentionSpec, RecurrentSpec
from ..cache.kv_format import KVFormat
from ..cache.paged import PagedCache
from ..cache.pages import pages_for
from ..cache.state import LEAST_BYTES
from ..cache.store import LayerStore
from ..config import MAX_DRAFT
from ..device import DeviceMemory, device_memory, is_gpu, limit_memory
from ..errors import MemoryPlanError, PromptError
from ..models.decoder import Model
from .step_memory import StepSize, kept_arrays, step_size, weight_arrays

_GPU_CHUNK = 512
_CPU_CHUNK = 64
"""Rows of a step on the CPU, where larger ones are not faster and would delay Ctrl-C."""

_MOST_REUSE = 2 * 2**30
_REUSE_SHARE = 0.25
"""Share of the room besides the weights for what is only kept in case a later prompt begins alike."""
_SNAPSHOT_SHARE = {False: 0.125, True: 0.5}
"""Share of what is kept for reuse, by whether layers are recurrent: their states are large and cannot be found in the pool."""
_SEQUENCES_SHARE = 0.5
"""Share of the room, at most, for what running sequences take whatever their length: fewer run together where it would be more."""
_LEAST_TOKENS = 4 * PAGE
_MOST_BUFFERS_SHARE = 0.75
MAX_SEQUENCES = 16
_ENDLESS = 2**40
"""Stands for "unlimited": with only windows and recurrent states, further tokens cost no memory."""


class Planned(Protocol):
    """A model that is loaded, or of which only the headers were read."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """How the memory is divided. Sizes are in bytes unless a field says otherwise; `used` and `left` add up to `limit`."""

    total: int
    """Memory there is, whatever this process may take of it."""
    source: str
    """Which limit `total` is, for messages: "physical memory", "recommended working set", a control group."""
    limit: int
    """Memory that the weights, the cache and a step may take together."""
    weights: int
    """Bytes of the model's weights."""
    draft_weights: int
    """Weights of the draft model; 0 without one."""
    step: int
    """Peak of one step's activations, in addition to everything that stays."""
    max_sequences: int
    """Sequences that run together, a count."""
    sequence: int
    """Bytes each running sequence takes whatever its length: open pages, windows, recurrent states."""
    token: float
    """Bytes for each token of context, in the layers without a window."""
    pool_tokens: int
    """Tokens that the page pool holds, for all sequences and for reuse."""
    context: int
    """Tokens that one sequence may have."""
    room_tokens: int
    """Tokens of one sequence that would fit if the model allowed any number."""
    prefix_cache_tokens: int
    """Tokens of the pool that are kept for prompts that begin alike."""
    reuse: int
    """Pages of layers with a window that are kept for reuse; those of layers without one are in the pool."""
    snapshots: int
    """Recurrent states and window contents that are kept for reuse."""
    buffers: int
    """Arrays that can be alive at once, a count."""
    buffer_limit: int | None
    """The device's limit of `buffers`; None where it has none."""
    rows: int
    """Tokens of the largest step."""

    @property
    def pool(self) -> int:
        """Bytes of the page pool."""
        return int(self.pool_tokens * self.token)

    @property
    def sequences(self) -> int:
        """Bytes that all running sequences take whatever their length."""
        return self.max_sequences * self.sequence

    @property
    def used(self) -> int:
        return self.weights + self.draft_weights + self.step + self.sequences + self.pool + self.reuse + self.snapshots

    @property
    def left(self) -> int:
        return self.limit - self.used

    def apply(self) -> None:
        """Set MLX's limits accordingly, for the whole process."""
        limit_memory(self.used, self.step)


def usable_memory(memory_gb: float | None = None, memory: DeviceMemory | None = None) -> int:
    """Bytes that a model and all that belongs to it may take: the device's, or the caller's limit in GB if that is lower."""
    usable = (memory or device_memory()).usable
    return usable if memory_gb is None else min(usable, int(memory_gb * 1e9))


def plan_memory(
    planned: Planned,
    *,
    max_context: int | None = None,
    max_sequences: int = MAX_SEQUENCES,
    kv: KVFormat | None = None,
    draft: Planned | None = None,
    memory_gb: float | None = None,
    prefix_cache: bool = True,
    max_draft: int = MAX_DRAFT,
    memory: DeviceMemory | None = None,
) -> MemoryPlan:
    """The longest context and the largest cache that fit, for a model and its draft model together.

    `max_context` and `max_sequences` are upper bounds, `memory_gb` is the caller's limit (GB of 10^9 bytes), `memory` replaces the
    device's. Needs no weights: a `PreparedModel` does. Raises `MemoryPlanError` where the weights and a context of 256 tokens do not
    fit, and `PromptError` for a context that the model does not have.
    """
    memory = memory or device_memory()
    wanted, rows = _context(planned.model, max_context), _GPU_CHUNK if is_gpu() else _CPU_CHUNK
    sampled = min(max_sequences * (1 + max_draft), rows)
    demands = _demands(planned, kv or KVFormat(), rows, sampled)
    total = demands + _demands(draft, KVFormat(), rows, sampled) if draft else demands
    limit = usable_memory(memory_gb, memory)
    shares = _divide(total, limit, wanted, max_sequences, prefix_cache)
    least = min(wanted, _LEAST_TOKENS)
    if shares.context < least or total.weights + total.load > limit:
        raise MemoryPlanError(_does_not_fit(total, least, limit, "memory_gb" if limit < memory.usable else memory.source))
    snapshots, buffers = _within_buffers(total, shares.snapshots, memory.buffers)
    return MemoryPlan(
        total=memory.total,
        source=memory.source,
        limit=limit,
        weights=demands.weights,
        draft_weights=total.weights - demands.weights,
        step=total.step.fixed + int(total.step.per_token * shares.context),
        max_sequences=shares.max_sequences,
        sequence=total.sequence,
        token=total.token,
        pool_tokens=shares.pool_tokens,
        context=shares.context,
        room_tokens=shares.room_tokens,
        prefix_cache_tokens=shares.prefix_cache_tokens,
        reuse=int(shares.prefix_cache_tokens * total.window_token),
        snapshots=snapshots,
        buffers=buffers,
        buffer_limit=memory.buffers,
        rows=rows,
    )


@dataclass(frozen=True, slots=True)
class _Demands:
    """What a model, or a model and its draft model, need: bytes, unless a field says otherwise."""

    weights: int
    load: int
    """Needed besides the weights while they are read."""
    step: StepSize
    token: float
    """For each token of context, in layers without a window."""
    window_token: float
    """For each token that is kept for reuse, in layers with a window."""
    sequence: int
    """For each running sequence, whatever its length."""
    recurrent: bool
    """Whether a layer keeps a state that changes with every token."""
    weight_arrays: int
    """Arrays of weights, a count."""
    layer_arrays: int
    """Arrays of the cache, a count."""

    def __add__(self, other: _Demands) -> _Demands:
        return _Demands(
            self.weights + other.weights,
            max(self.load, other.load),
            self.step + other.step,
            self.token + other.token,
            self.window_token + other.window_token,
            self.sequence + other.sequence,
            self.recurrent or other.recurrent,
            self.weight_arrays + other.weight_arrays,
            self.layer_arrays + other.layer_arrays,
        )


def _demands(planned: Planned, kv: KVFormat, rows: int, sampled: int) -> _Demands:
    layers, dtype = planned.model.layers, planned.dtype
    token = PagedCache.token_bytes(layers, dtype, kv)
    windows = [s for s in layers if isinstance(s, AttentionSpec) and s.window is not None]
    states = sum(prod(shape) for s in layers if isinstance(s, RecurrentSpec) for shape in s.shapes) * mx.float32.size
    held = sum(LayerStore.page_bytes(s, dtype, kv) * pages_for(2**31, s.window, rows) for s in windows)
    return _Demands(
        weights=planned.weight_bytes,
        load=planned.load_bytes,
        step=step_size(planned.model, dtype, kv, rows, sampled),
        token=token,
        window_token=sum(LayerStore.page_bytes(s, dtype, kv) for s in windows) / PAGE,
        sequence=PagedCache.sequence_bytes(layers, dtype, kv) + states + held,
        recurrent=bool(states),
        weight_arrays=weight_arrays(planned.model),
        layer_arrays=sum(kept_arrays(planned.model)),
    )


@dataclass(frozen=True, slots=True)
class _Shares:
    """How the memory is divided."""

    context: int
    room_tokens: int
    pool_tokens: int
    max_sequences: int
    prefix_cache_tokens: int
    snapshots: int


def _divide(demands: _Demands, limit: int, wanted: int, max_sequences: int, prefix_cache: bool) -> _Shares:
    room = limit - demands.weights - demands.step.fixed
    if demands.sequence:
        max_sequences = max(min(max_sequences, int(room * _SEQUENCES_SHARE / demands.sequence)), 1)
    room = max(room - max_sequences * demands.sequence, 0)
    kept = min(_MOST_REUSE, int(room * _REUSE_SHARE)) if prefix_cache else 0
    snapshots = int(kept * _SNAPSHOT_SHARE[demands.recurrent])
    token = demands.token + demands.window_token
    prefix_cache_tokens = int((kept - snapshots) / token) if token else 0
    room -= snapshots + int(prefix_cache_tokens * demands.window_token)
    most = int(room / (demands.token + demands.step.per_token)) if demands.token else _ENDLESS if room else 0
    context, pool = min(wanted, most), wanted * max_sequences + prefix_cache_tokens
    if demands.token:
        pool = min(pool, int((room - demands.step.per_token * context) / demands.token))
        prefix_cache_tokens = min(prefix_cache_tokens, pool)
    return _Shares(context, most, pool, max_sequences, prefix_cache_tokens, snapshots)


def _within_buffers(demands: _Demands, snapshots: int, limit: int | None) -> tuple[int, int]:
    """Bytes of snapshots, reduced where they could be too many arrays, and the most arrays that can be alive then."""
    fixed = demands.weight_arrays + demands.layer_arrays + demands.step.arrays
    if limit is not None:
        snapshots = min(snapshots, max(int(limit * _MOST_BUFFERS_SHARE) - fixed, 0) * LEAST_BYTES)
    return snapshots, fixed + snapshots // LEAST_BYTES


def _context(model: Model, wanted: int | None) -> int:
    if wanted is not None and not 1 <= wanted <= model.max_context:
        raise PromptError(f"the context can be 1 to {model.max_context} tokens long for this model, not {wanted}")
    return model.max_context if wanted is None else wanted


def _does_not_fit(demands: _Demands, least: int, limit: int, source: str) -> str:
    running = demands.step.fixed + demands.sequence + int(least * (demands.token + demands.step.per_token))
    extra, what = max((demands.load, "reading them"), (running, f"running {least} tokens of context"))
    return (
        f"not enough memory: the model needs {_gb(demands.weights + extra)} GB, and {_gb(limit)} GB may be used ({source}). "
        f"Its weights take {_gb(demands.weights)} GB, {what} takes {_gb(extra)} GB more. "
        "Use a smaller or more quantized model, fewer bits for the cache, or allow more memory"
    )


def _gb(count: float) -> str:
    """Three significant digits, so that small parts do not vanish: 0.0983, 1.25, 17.4, 550."""
    return f"{count / 1e9:.3g}" if count < 1e12 else f"{count / 1e9:.0f}"
