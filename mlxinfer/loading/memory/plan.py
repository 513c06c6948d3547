"""The memory plan, made before a weight is read: weights, the cache, a step, images, and pages and states kept for reuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ...cache.base import PAGE, BidirectionalSpec, sees_spans
from ...cache.kv_format import KVFormat
from ...cache.state import LEAST_BYTES
from ...config import MAX_DRAFT, MAX_NUM_SEQS
from ...errors import MemoryPlanError, PromptError
from ...models.decoder import Model
from ...util.dataclass import dataclass
from ...util.device import DeviceMemory, device_memory, is_gpu
from .experts import ExpertDemand, ExpertMemory
from .images import ImageMemory, ImagePlan
from .step import Demands, Planned, StepRows, demands_of, with_scored

if TYPE_CHECKING:
    from ...types import EngineStats

_USUAL_CHUNK = 512
"""Rows of a step on a GPU."""
_LONG_CHUNKS = (2048, 1024)
"""More rows; the first value that takes little memory is used."""
_SHORT_CHUNK = 256
"""Fewer rows, for short memory."""
_LONG_STEP_SHARE = 0.125
"""Share of the memory besides the weights for a step of more than the usual rows, and for the windows that it extends."""
_CPU_CHUNK = 64
"""Rows of a step on the CPU, where larger steps are not faster and would delay Ctrl-C."""
_POOLED_CHUNKS = {False: (512, 256, 128, _CPU_CHUNK), True: (*_LONG_CHUNKS, _USUAL_CHUNK, _SHORT_CHUNK)}
"""Rows of a step of a model with pooled experts, by whether there is a GPU. A step reads each expert at most once."""
_SCORED_SHARE = 1 / 16
"""Share of the memory besides the weights for the logits of prompts, if requested."""
_LEAST_SCORED = 16
GOOD_CONTEXT = 8192
"""Tokens of context that come before long chunks and before further sequences."""
_LEAST_TOKENS = 4 * PAGE
_MOST_REUSE = 2 * 2**30
_REUSE_SHARE = 0.25
"""Share of the memory besides the weights for what is kept in case a later prompt starts alike."""
_SHORT_REUSE_SHARE = 0.125
"""The same if memory limits the context."""
_SNAPSHOT_SHARE = {False: 0.125, True: 0.5}
"""Share of that for snapshots, by whether layers are recurrent: their states are large and not in the pool."""
_SEQUENCES_SHARE = 0.5
"""Maximum share of the memory for the fixed costs of running sequences. Fewer run if they would need more."""
_MOST_BUFFERS_SHARE = 0.75
_ENDLESS = 2**40
"""Stands for "unlimited": with only windows and recurrent states, further tokens cost no memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Division of the memory. Bytes, unless a field says otherwise; `used` and `left` add up to `limit`."""

    total: int
    """Memory of the device, whatever part this process may take."""
    source: str
    """Name of the limit `total`, for messages: "physical memory", "recommended working set", a control group."""
    limit: int
    """Memory for the weights, the cache and a step together."""
    weights: int
    """Weights of the model and its adapters."""
    draft_weights: int
    """Weights of the draft model; 0 without one."""
    step: int
    """Peak of one step's activations, in addition to everything that stays."""
    growth: int
    """Additional peak while the page pool grows between two steps: parts of it exist twice."""
    max_num_seqs: int
    """Maximum number of running sequences."""
    sequence: int
    """Bytes of each running sequence, whatever its length: open pages, windows, recurrent states."""
    token: float
    """Bytes of each token of context, in the layers without a window."""
    pool_tokens: int
    """Tokens in the page pool, of all sequences and for reuse."""
    context: int
    """Maximum tokens of one sequence."""
    room_tokens: int
    """Tokens of one sequence that would fit if the model allowed any number."""
    prefix_cache_tokens: int
    """Tokens of the pool that are kept for prompts with the same start."""
    reuse: int
    """Pages kept for reuse of layers with a window; those of layers without one are in the pool."""
    snapshots: int
    """Recurrent states and window contents kept for reuse."""
    buffers: int
    """Count of arrays that can be alive at once."""
    buffer_limit: int | None
    """The device's limit of `buffers`, or None."""
    rows: int
    """Tokens of the largest step."""
    scored_rows: int
    """Maximum rows of prompts whose logits one step computes, if requested."""
    images: ImagePlan | None = None
    """Memory of images, and the largest one; None for a model that cannot see."""
    experts: ExpertMemory | None = None
    """Pools of routed experts, which are part of `weights`; None if all experts are resident."""

    @property
    def vision(self) -> int:
        """Bytes for images: the tower, its activations, and features that are kept."""
        return self.images.used if self.images else 0

    @property
    def pool(self) -> int:
        """Bytes of the page pool."""
        return int(self.pool_tokens * self.token)

    @property
    def sequences(self) -> int:
        """Bytes of all running sequences, whatever their length."""
        return self.max_num_seqs * self.sequence

    @property
    def used(self) -> int:
        model = self.weights + self.draft_weights + self.step + self.growth + self.sequences + self.pool + self.reuse + self.snapshots
        return model + self.vision

    @property
    def peak(self) -> int:
        """Bytes that come and go: a step, and an image in the tower."""
        return self.step + (self.images.step if self.images else 0)

    @property
    def left(self) -> int:
        return self.limit - self.used

    def in_use(self, stats: EngineStats) -> int:
        """Bytes in use by the weights, pages and sequences of an engine with these `stats`; at most `used`."""
        pages = min((stats.pages_used + stats.pages_cached) * PAGE * self.token, self.pool)
        tower = self.images.weights if self.images else 0
        return self.weights + self.draft_weights + tower + int(pages) + stats.running * self.sequence


def usable_memory(memory_gb: float | None = None, memory: DeviceMemory | None = None) -> int:
    """Bytes for a model with its cache and steps: the device's unreserved memory, or the caller's limit in GB if that is lower."""
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
    adapter_bytes: int = 0,
    memory_gb: float | None = None,
    prefix_cache: bool = True,
    max_draft: int = MAX_DRAFT,
    deterministic: bool = False,
    images: ImageMemory | None = None,
    experts: ExpertDemand | None = None,
    memory: DeviceMemory | None = None,
) -> MemoryPlan:
    """The longest context and the largest cache that fit, for a model with its adapters and its draft model.

    `max_context` and `max_num_seqs` are upper bounds: if memory is short, fewer sequences come before a shorter context. `memory_gb` is
    the caller's limit (GB of 10^9 bytes), `images` plans for a tower, `memory` replaces the device's. With `experts`, routed experts may
    stay in a file. Needs no weights: a `PreparedModel` does. Raises `MemoryPlanError` if the weights and a context of 256 tokens do not
    fit, `PromptError` for a context that the model does not have.
    """
    memory = memory or device_memory()
    plan = partial(
        _plan,
        max_context=max_context,
        max_num_seqs=max_num_seqs,
        kv=kv or KVFormat(),
        draft=draft,
        adapter_bytes=adapter_bytes,
        memory_gb=memory_gb,
        prefix_cache=prefix_cache,
        max_draft=max_draft,
        deterministic=deterministic,
        images=images,
        memory=memory,
    )
    return plan(planned) if experts is None else _with_pools(planned, plan, experts, usable_memory(memory_gb, memory))


def _plan(
    planned: Planned,
    *,
    max_context: int | None,
    max_num_seqs: int,
    kv: KVFormat,
    draft: Planned | None,
    adapter_bytes: int,
    memory_gb: float | None,
    prefix_cache: bool,
    max_draft: int,
    deterministic: bool,
    images: ImageMemory | None,
    memory: DeviceMemory,
    pools: ExpertMemory | None = None,
) -> MemoryPlan:
    """Plan a model whose weights are all resident, or a `PooledModel` with its `pools`. See `plan_memory`."""
    whole, model = usable_memory(memory_gb, memory), planned.model
    weights = planned.weight_bytes + adapter_bytes
    seen = _planned_images(images, whole, weights + (draft.weight_bytes if draft else 0))
    limit = max(whole - (seen.used if seen else 0), 0)
    span = images.span() if images and sees_spans(model.layers) else 0
    wanted, whole_texts = _checked_context(model, max_context), _looks_both_ways(model)
    scored_bytes, least_scored = int((limit - weights) * _SCORED_SHARE), PAGE if deterministic else _LEAST_SCORED

    def option(rows: int, sequences: int) -> Option:
        step = with_scored(model, _step_rows(rows, sequences, max_draft, span), scored_bytes, least_scored)
        demands = demands_of(planned, kv, step, weights)
        if draft is not None:
            demands += demands_of(draft, KVFormat(), step, draft.weight_bytes)
        reuse = 0.0 if whole_texts or not prefix_cache else _REUSE_SHARE
        plan = _divided(demands, memory, limit, wanted, step, weights, reuse)
        if reuse and plan.context < wanted:
            plan = _divided(demands, memory, limit, wanted, step, weights, _SHORT_REUSE_SHARE)
        return demands, replace(plan, rows=rows)

    demands, plan = _best_option(option, max_num_seqs, wanted, whole_texts, pools.pools if pools else None)
    least = min(wanted, _LEAST_TOKENS)
    if plan.context < least or demands.weights + demands.load > limit:
        source = "memory_gb" if whole < memory.usable - memory.reserved else memory
        raise MemoryPlanError(_does_not_fit(demands, least, whole, source, seen, pools))
    plan = replace(plan, experts=pools)
    if images is None or seen is None:
        return plan
    return replace(plan, limit=whole, images=images.within(seen, plan.context, max(plan.rows, span) if span else None))


_POOL_SHARES = (0.9, 0.8, 0.7, 0.6, 0.45, 0.3, 0.15)
"""Shares of the memory besides dense weights that are tried for the pools of experts. The rest is for the cache and steps."""


def _with_pools(planned: Planned, plan: Callable[..., MemoryPlan], demand: ExpertDemand, whole: int) -> MemoryPlan:
    """Plan a model whose routed experts may stay in a file; `plan` is `_plan` with the caller's arguments.

    `demand.wanted` bytes are for the pools. Without that number, all experts are resident if they fit. Otherwise the pools get the
    largest share that leaves memory for a good context, or else the minimum. Raises `MemoryPlanError`.
    """
    dense = planned.weight_bytes - demand.nbytes

    def with_pools(nbytes: int, **limits: int) -> MemoryPlan:
        pools = demand.pooled(nbytes, dense)
        return plan(demand.beside(planned, pools), pools=pools, **limits)

    if demand.wanted is not None:
        return plan(planned) if demand.wanted >= demand.nbytes else with_pools(demand.wanted)
    try:
        return plan(planned)
    except MemoryPlanError:
        least = with_pools(0)  # raises for a model that does not fit even so
    for share in _POOL_SHARES:
        nbytes = int(share * max(whole - dense, 0))
        try:
            if with_pools(nbytes, max_num_seqs=1).context >= min(GOOD_CONTEXT, least.context):
                return with_pools(nbytes)
        except MemoryPlanError:
            continue
    return least


def _step_rows(rows: int, sequences: int, drafts: int, span: int) -> StepRows:
    """Return the rows of the largest step. A span may be longer than the `rows` of other steps. Rows of answers come in addition, and
    drafts in half of what these leave."""
    most = max(rows, span + (rows + sequences) // 2) if span else rows
    return StepRows(rows=most, sequences=sequences, drafts=drafts, span=max(rows, span) if span else 0)


def _planned_images(images: ImageMemory | None, limit: int, weights: int) -> ImagePlan | None:
    return None if images is None else images.plan(limit, limit - weights - images.weights)


Option = tuple[Demands, MemoryPlan]
"""One way to divide the memory."""


def _best_option(
    option: Callable[[int, int], Option], max_num_seqs: int, wanted: int, whole_texts: bool, pool_bytes: int | None = None
) -> Option:
    """The most sequences and the longest steps that leave memory for a good context, or else the longest context.

    `option` takes the rows of a step and the sequences. `pool_bytes` are those of pooled experts.
    """
    good = min(wanted, GOOD_CONTEXT)
    found: list[Option] = []
    sequences = max_num_seqs
    while sequences:
        if whole_texts:
            found.append(option(max(wanted, _USUAL_CHUNK), sequences))  # a step takes the longest text whole
        elif pool_bytes is not None:
            found.append(_pooled_rows(option, sequences, pool_bytes))
        elif not is_gpu():
            found.append(option(_CPU_CHUNK, sequences))
        else:
            found.append(_best_rows(option, sequences, good))
        if found[-1][1].context >= good:
            return found[-1]
        sequences //= 2
    return max(found, key=lambda option: option[1].context)


def _best_rows(option: Callable[[int, int], Option], sequences: int, good: int) -> Option:
    """The rows of a step on a GPU, for this many sequences and a context of at least `good` tokens if possible."""
    usual = option(_USUAL_CHUNK, sequences)
    if usual[1].context < good:
        return option(_SHORT_CHUNK, sequences) if sequences <= _SHORT_CHUNK else usual
    for rows in _LONG_CHUNKS:
        longer = option(rows, sequences)
        if longer[1].context >= good and _takes_little(longer, usual):
            return longer
    return usual


def _pooled_rows(option: Callable[[int, int], Option], sequences: int, pool_bytes: int) -> Option:
    """Return the most rows of a step that take little of the memory besides dense weights. Slots for experts are worth less."""
    for rows in _POOLED_CHUNKS[is_gpu()]:
        demands, plan = found = option(rows, sequences)
        if demands.step.at(0) <= _LONG_STEP_SHARE * (plan.limit - demands.weights + pool_bytes):
            break
    return found


def _takes_little(longer: Option, usual: Option) -> bool:
    (demands, plan), (usual_demands, usual_plan) = longer, usual
    windows = plan.max_num_seqs * (plan.sequence - usual_plan.sequence)
    return demands.step.at(0) + windows <= _LONG_STEP_SHARE * (plan.limit - usual_demands.weights)


def _divided(
    demands: Demands, memory: DeviceMemory, limit: int, wanted: int, step: StepRows, weights: int, reuse_share: float
) -> MemoryPlan:
    """Divide `limit` bytes of `memory` for a context of `wanted` tokens, or as many as fit. `weights` are the model's, in bytes."""
    sequences, size = step.sequences, demands.step
    room = limit - demands.weights - size.at(0)
    if demands.sequence:
        sequences = max(min(sequences, int(room * _SEQUENCES_SHARE / demands.sequence)), 1)
    room -= sequences * demands.sequence
    kept = min(_MOST_REUSE, int(max(room, 0) * reuse_share))
    snapshots = int(kept * _SNAPSHOT_SHARE[demands.recurrent])
    token = demands.token + demands.window_token
    prefix_cache_tokens = int((kept - snapshots) / token) if token else 0
    room += size.at(0) - snapshots - int(prefix_cache_tokens * demands.window_token)

    def besides(context: int, pool: int) -> int:
        return size.at(context, sequences) + size.growth(context, sequences, pool)

    if demands.token:
        most = _largest(room, demands.token, lambda tokens: besides(tokens, tokens))
        context = min(wanted, most)
        pool = min(wanted * sequences + prefix_cache_tokens, _largest(room, demands.token, lambda tokens: besides(context, tokens)))
        prefix_cache_tokens = min(prefix_cache_tokens, pool)
    else:
        most = _ENDLESS if room > size.at(0) else 0
        context, pool = min(wanted, most), wanted * sequences + prefix_cache_tokens
    if memory.buffers is not None:
        snapshots = min(snapshots, max(int(memory.buffers * _MOST_BUFFERS_SHARE) - demands.arrays, 0) * LEAST_BYTES)
    return MemoryPlan(
        total=memory.total,
        source=memory.source,
        limit=limit,
        weights=weights,
        draft_weights=demands.weights - weights,
        step=size.at(context, sequences),
        growth=size.growth(context, sequences, pool),
        max_num_seqs=sequences,
        sequence=demands.sequence,
        token=demands.token,
        pool_tokens=pool,
        context=context,
        room_tokens=most,
        prefix_cache_tokens=prefix_cache_tokens,
        reuse=int(prefix_cache_tokens * demands.window_token),
        snapshots=snapshots,
        buffers=demands.arrays + snapshots // LEAST_BYTES,
        buffer_limit=memory.buffers,
        rows=step.rows,
        scored_rows=step.scored,
    )


def _largest(room: int, token: float, besides: Callable[[int], int]) -> int:
    """The most tokens that fit in `room` bytes if n tokens take n * `token` + `besides(n)`; 0 if none do."""
    fits, fails = 0, int(max(room, 0) / token) + 1
    while fails - fits > 1:
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if middle * token + besides(middle) <= room else (fits, middle)
    return fits


def _looks_both_ways(model: Model) -> bool:
    return any(isinstance(spec, BidirectionalSpec) for spec in model.layers)


def _checked_context(model: Model, wanted: int | None) -> int:
    if wanted is not None and not 1 <= wanted <= model.max_context:
        raise PromptError(f"the context can be 1 to {model.max_context} tokens long for this model, not {wanted}")
    return model.max_context if wanted is None else wanted


def _does_not_fit(
    demands: Demands,
    least: int,
    limit: int,
    source: DeviceMemory | str,
    images: ImagePlan | None,
    pools: ExpertMemory | None,
) -> str:
    running = demands.sequence + int(least * demands.token) + demands.step.at(least)
    extra, what = max((demands.load, "reading them"), (running, f"running {least} tokens of context"))
    allowed, advice = (source, "") if isinstance(source, str) else (source.source, _other_models(source))
    seen, tower = (images.used, f", images {_gb(images.used)}") if images else (0, "")
    advice += "Load it without images (--no-vision). " if images else ""
    needs, parts = "needs", f"weights {_gb(demands.weights)}"
    if pools is not None:
        needs = "needs, with its experts read from the disk,"
        parts = f"weights without experts {_gb(demands.weights - pools.pools)}, slots for experts {_gb(pools.pools)}"
    return (
        f"not enough memory: {_gb(limit)} GB may be used ({allowed}), and the model {needs} {_gb(demands.weights + extra + seen)} GB "
        f"({parts}, {what} {_gb(extra)}{tower}). {advice}"
        "Use a smaller or more quantized model, fewer bits for the cache, or allow more memory"
    )


def _other_models(memory: DeviceMemory) -> str:
    if not memory.reserved:
        return ""
    return f"Other models of this process hold {_gb(memory.reserved)} GB: close them, or give each of them its memory_gb. "


def _gb(count: float) -> str:
    """Three significant digits, so that small parts do not vanish: 0.0983, 1.25, 17.4, 550."""
    return f"{count / 1e9:.3g}" if count < 1e12 else f"{count / 1e9:.0f}"
