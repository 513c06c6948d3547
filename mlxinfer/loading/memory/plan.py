"""The memory plan, made before a weight is read: weights, the cache, a step, and what is kept for reuse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import mlx.core as mx

from ...cache.base import PAGE, AttentionSpec, BidirectionalSpec
from ...cache.kv_format import KVFormat
from ...cache.paged import PagedCache
from ...cache.pages import pages_for
from ...cache.store import LayerStore
from ...config import MAX_DRAFT, MAX_NUM_SEQS
from ...errors import MemoryPlanError, PromptError
from ...models.decoder import Model
from ...util.dataclass import dataclass
from ...util.device import DeviceMemory, device_memory, is_gpu
from .shares import Demands, Shares, divide, within_buffers
from .step import StepRows, kept_arrays, state_bytes, step_size, weight_arrays, with_scored

if TYPE_CHECKING:
    from ...types import EngineStats

_USUAL_CHUNK = 512
"""Rows of a step on a GPU."""
_LONG_CHUNKS = (2048, 1024)
"""More rows, the first of them that takes little memory."""
_SHORT_CHUNK = 256
"""Fewer rows, where memory is short."""
_LONG_STEP_SHARE = 0.125
"""Share of the memory besides the weights that may go to a step of more rows than usual, and to what windows then keep."""
_CPU_CHUNK = 64
"""Rows of a step on the CPU, where larger ones are not faster and would delay Ctrl-C."""
_OPEN_PAGES_IN_FLIGHT = 1.5
"""Open pages of a sequence that a step on a GPU writes anew: a copy where MLX cannot write in place, and 16 recent rows, old and new."""
_SCORED_SHARE = 1 / 16
"""Share of the memory besides the weights for the logits of prompts, where they are asked for."""
_LEAST_SCORED = 16
GOOD_CONTEXT = 8192
"""Tokens of context that come before long chunks and before further sequences."""
_LEAST_TOKENS = 4 * PAGE


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
    """Bytes of the model's weights, and of its adapters."""
    draft_weights: int
    """Weights of the draft model; 0 without one."""
    step: int
    """Peak of one step's activations, in addition to everything that stays."""
    growth: int
    """What the page pool takes beyond that while it grows, between two steps: parts of it are there twice."""
    max_num_seqs: int
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
    scored_rows: int
    """Rows of prompts whose logits one step computes at most, where they are asked for."""

    @property
    def pool(self) -> int:
        """Bytes of the page pool."""
        return int(self.pool_tokens * self.token)

    @property
    def sequences(self) -> int:
        """Bytes that all running sequences take whatever their length."""
        return self.max_num_seqs * self.sequence

    @property
    def used(self) -> int:
        return self.weights + self.draft_weights + self.step + self.growth + self.sequences + self.pool + self.reuse + self.snapshots

    @property
    def left(self) -> int:
        return self.limit - self.used

    def in_use(self, stats: EngineStats) -> int:
        """Bytes of the weights, and of the pages and sequences of an engine with these `stats`. `used` is their limit."""
        pages = min((stats.pages_used + stats.pages_cached) * PAGE * self.token, self.pool)
        return self.weights + self.draft_weights + int(pages) + stats.running * self.sequence


def usable_memory(memory_gb: float | None = None, memory: DeviceMemory | None = None) -> int:
    """Bytes that a model and all that belongs to it may take: the device's, less what is reserved, or the caller's limit in GB if that is
    lower."""
    memory = memory or device_memory()
    free = max(memory.usable - memory.reserved, 0)
    return free if memory_gb is None else min(free, int(memory_gb * 1e9))


def plan_memory(
    planned: Planned,
    *,
    max_context: int | None = None,
    max_num_seqs: int = MAX_NUM_SEQS,
    kv: KVFormat | None = None,
    draft: Planned | None = None,
    memory_gb: float | None = None,
    prefix_cache: bool = True,
    max_draft: int = MAX_DRAFT,
    deterministic: bool = False,
    memory: DeviceMemory | None = None,
) -> MemoryPlan:
    """The longest context and the largest cache that fit, for a model and its draft model together.

    `max_context` and `max_num_seqs` are upper bounds: where memory is short, fewer sequences come before a shorter context. `memory_gb` is
    the caller's limit (GB of 10^9 bytes), `memory` replaces the device's. Needs no weights: a `PreparedModel` does. Raises
    `MemoryPlanError` where the weights and a context of 256 tokens do not fit, `PromptError` for a context that the model does not have.
    """
    memory = memory or device_memory()
    limit = usable_memory(memory_gb, memory)
    request = _Request(
        planned=planned,
        draft=draft,
        kv=kv or KVFormat(),
        limit=limit,
        wanted=_context(planned.model, max_context),
        drafts=max_draft,
        prefix_cache=prefix_cache and not _looks_both_ways(planned.model),
        least_scored=PAGE if deterministic else _LEAST_SCORED,
    )
    chosen = request.best(max_num_seqs)
    demands, shares = chosen.demands, chosen.shares
    least = min(request.wanted, _LEAST_TOKENS)
    if shares.context < least or demands.weights + demands.load > limit:
        raise MemoryPlanError(_does_not_fit(demands, least, limit, "memory_gb" if limit < memory.usable - memory.reserved else memory))
    snapshots, buffers = within_buffers(demands, shares.snapshots, memory.buffers)
    return MemoryPlan(
        total=memory.total,
        source=memory.source,
        limit=limit,
        weights=planned.weight_bytes,
        draft_weights=demands.weights - planned.weight_bytes,
        step=shares.step,
        growth=shares.growth,
        max_num_seqs=shares.sequences,
        sequence=demands.sequence,
        token=demands.token,
        pool_tokens=shares.pool_tokens,
        context=shares.context,
        room_tokens=shares.room_tokens,
        prefix_cache_tokens=shares.prefix_cache_tokens,
        reuse=int(shares.prefix_cache_tokens * demands.window_token),
        snapshots=snapshots,
        buffers=buffers,
        buffer_limit=memory.buffers,
        rows=chosen.step.rows,
        scored_rows=chosen.step.scored,
    )


@dataclass(frozen=True, slots=True)
class _Option:
    """One way to divide the memory."""

    step: StepRows
    demands: Demands
    shares: Shares
    good: bool
    """Whether the context is long enough to think of anything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What is planned for."""

    planned: Planned
    draft: Planned | None
    kv: KVFormat
    limit: int
    """Bytes."""
    wanted: int
    """Tokens of context."""
    drafts: int
    """Tokens drafted for a sequence, at most."""
    prefix_cache: bool
    least_scored: int
    """Rows of a prompt, at least, whose logits can be computed in one step."""

    def best(self, max_num_seqs: int) -> _Option:
        """The most sequences and the longest steps that leave room for a good context; or else the longest context."""
        found: list[_Option] = []
        sequences = max_num_seqs
        while sequences:
            found.append(self._with_sequences(sequences))
            if found[-1].good:
                return found[-1]
            sequences //= 2
        return max(found, key=lambda option: option.shares.context)

    def _with_sequences(self, sequences: int) -> _Option:
        if _looks_both_ways(self.planned.model):
            return self._option(max(self.wanted, _USUAL_CHUNK), sequences)  # a step takes the longest text whole
        if not is_gpu():
            return self._option(_CPU_CHUNK, sequences)
        usual = self._option(_USUAL_CHUNK, sequences)
        if not usual.good:
            return self._option(_SHORT_CHUNK, sequences) if sequences <= _SHORT_CHUNK else usual
        longer = (self._option(rows, sequences) for rows in _LONG_CHUNKS)
        return next((option for option in longer if option.good and self._takes_little(option, usual)), usual)

    def _takes_little(self, option: _Option, usual: _Option) -> bool:
        windows = option.shares.sequences * (option.demands.sequence - usual.demands.sequence)
        return option.demands.step.at(0) + windows <= _LONG_STEP_SHARE * (self.limit - usual.demands.weights)

    def _option(self, rows: int, sequences: int) -> _Option:
        step = StepRows(rows=rows, sequences=sequences, drafts=self.drafts)
        room = int((self.limit - self.planned.weight_bytes) * _SCORED_SHARE)
        step = with_scored(self.planned.model, step, room, self.least_scored)
        demands = _demands(self.planned, self.kv, step)
        if self.draft is not None:
            demands += _demands(self.draft, KVFormat(), step)
        shares = divide(demands, self.limit, self.wanted, sequences, prefix_cache=self.prefix_cache)
        return _Option(step, demands, shares, shares.context >= min(self.wanted, GOOD_CONTEXT))


def _looks_both_ways(model: Model) -> bool:
    return any(isinstance(spec, BidirectionalSpec) for spec in model.layers)


def _demands(planned: Planned, kv: KVFormat, step: StepRows) -> Demands:
    layers, dtype = planned.model.layers, planned.dtype
    windows = [s for s in layers if isinstance(s, AttentionSpec) and s.window is not None]
    states = sum(map(state_bytes, layers))
    opened = PagedCache.sequence_bytes(layers, dtype, kv)
    if is_gpu():  # while a step is in flight, open pages and their recent rows are there twice
        opened += int(_OPEN_PAGES_IN_FLIGHT * PagedCache.sequence_bytes(layers, dtype))
    held = sum(LayerStore.page_bytes(s, dtype, kv) * pages_for(2**31, s.window, step.rows) for s in windows)
    return Demands(
        weights=planned.weight_bytes,
        load=planned.load_bytes,
        step=step_size(planned.model, dtype, kv, step),
        token=PagedCache.token_bytes(layers, dtype, kv),
        window_token=PagedCache.reuse_bytes(layers, dtype, kv),
        sequence=opened + states + held,
        recurrent=bool(states),
        weight_arrays=weight_arrays(planned.model),
        layer_arrays=sum(kept_arrays(planned.model)),
    )


def _context(model: Model, wanted: int | None) -> int:
    if wanted is not None and not 1 <= wanted <= model.max_context:
        raise PromptError(f"the context can be 1 to {model.max_context} tokens long for this model, not {wanted}")
    return model.max_context if wanted is None else wanted


def _does_not_fit(demands: Demands, least: int, limit: int, source: DeviceMemory | str) -> str:
    running = demands.sequence + int(least * demands.token) + demands.step.at(least)
    extra, what = max((demands.load, "reading them"), (running, f"running {least} tokens of context"))
    allowed, advice = (source, "") if isinstance(source, str) else (source.source, _others(source))
    return (
        f"not enough memory: {_gb(limit)} GB may be used ({allowed}), and the model needs {_gb(demands.weights + extra)} GB "
        f"(weights {_gb(demands.weights)}, {what} {_gb(extra)}). {advice}"
        "Use a smaller or more quantized model, fewer bits for the cache, or allow more memory"
    )


def _others(memory: DeviceMemory) -> str:
    if not memory.reserved:
        return ""
    return f"Other models of this process hold {_gb(memory.reserved)} GB: close them, or give each of them its memory_gb. "


def _gb(count: float) -> str:
    """Three significant digits, so that small parts do not vanish: 0.0983, 1.25, 17.4, 550."""
    return f"{count / 1e9:.3g}" if count < 1e12 else f"{count / 1e9:.0f}"
