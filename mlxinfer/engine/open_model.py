"""Opens a model as `EngineArgs` say, for `LLM` and `AsyncLLM`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .. import kernels_cpu
from ..cache.attention.select import fallback_lines
from ..cache.kv_format import KVFormat, loss_line, unquantized_lines
from ..cache.paged import PagedCache
from ..config import EngineArgs, EngineConfig, default_params
from ..errors import SettingError
from ..kernels_metal.kernel_trial import kernels_in_use
from ..loading.draft_head import head_in
from ..loading.find.fingerprint import content_fingerprint, fingerprint
from ..loading.find.resolve import prefix_dir
from ..loading.load import LoadedModel, PreparedModel, prepare
from ..loading.memory.budget import BUDGET, Reservation, shares
from ..loading.memory.experts import ExpertDemand, expert_demand
from ..loading.memory.images import image_memory
from ..loading.memory.kv_choice import kv_format
from ..loading.memory.plan import GOOD_CONTEXT, MemoryPlan, plan_memory
from ..loading.vision import vision_bytes
from ..loading.weights import Progress
from ..models.config_reader import check_ignored
from ..models.decoder import Model
from ..nn import few_row_experts, small_batch_matmul
from ..sampling import top_k_top_p as cuts
from ..structured_output.grammar import GrammarCompiler
from ..util.dataclass import dataclass
from ..util.device import DeviceMemory, is_gpu, no_device_lines
from ..vision.processor import DEFAULT_BUDGET
from .adapter_set import AdapterSet
from .core.engine import Engine
from .spec_decode.draft_model import Drafter, check_draft
from .text.input_processor import InputProcessor

if TYPE_CHECKING:
    from ..adapters.adapted_model import AdaptedModel
    from ..adapters.update import Adapter
    from ..cache.disk.backend import PageSource
    from ..loading.repack_cache.pooled_experts import PooledExperts
    from .pool_guard import PoolGuard
    from .runner.replay_check import ReplayCheck

_log = logging.getLogger(__name__)
_KEY_THERE = "MLXINFER_PREFILL_API_KEY"
"""Environment variable with the key of the server that reads prompts."""


class OtherMachines(Protocol):
    """Machines that have the rest of a model."""

    def share(self, found: PreparedModels) -> PreparedModels:
        """Return this machine's part of the model. Raises `MLXInferError` if the machines do not agree."""
        ...

    def limited(self, config: EngineConfig) -> EngineConfig:
        """Return the config with the limits of the smallest machine."""
        ...

    def join(self, model: Model) -> Callable[..., PagedCache]:
        """Wait until the machines have read their parts, and connect the model with them. Returns a function that makes its caches."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenModel:
    """A model that is ready to run."""

    args: EngineArgs
    loaded: LoadedModel
    config: EngineConfig
    """Limits of the engine, after memory was planned."""
    reservation: Reservation
    kv: KVFormat
    drafter: Drafter | None
    adapters: AdapterSet
    """Adapters that requests can name."""
    inputs: InputProcessor
    """Converts prompts to sequences."""
    notes: tuple[str, ...]
    make_cache: Callable[..., PagedCache] = PagedCache
    """Makes the cache of each new engine."""
    guard: PoolGuard | None = None
    """Decides the size of the pools of experts; None if all experts are resident."""

    @classmethod
    def open(cls, args: EngineArgs, progress: Progress | None = None, others: OtherMachines | None = None) -> OpenModel:
        """Plan the memory for the model, its draft model and the cache, then read the weights.

        With `others`, only a part of the model is read. Raises `MLXInferError`s.
        """
        if args.tool_format is not None:
            from ..output_format.detect import check_format_name

            check_format_name(args.tool_format)
        with prepare_models(args) as found:
            if others is not None:
                found = others.share(found)
            reservation = BUDGET.reserve(found.plan)
            try:
                config = engine_config(args, reservation.plan)
                if others is not None:
                    config = others.limited(config)
                pools = reservation.plan.experts
                loaded, drafter = found.read(progress, None if pools is None else pools.pools)
                return cls._of(found, loaded, config, reservation, drafter, others)
            except BaseException:
                reservation.release()
                raise

    @classmethod
    def _of(
        cls,
        found: PreparedModels,
        loaded: LoadedModel,
        config: EngineConfig,
        reservation: Reservation,
        drafter: Drafter | None,
        others: OtherMachines | None,
    ) -> OpenModel:
        make_cache = PagedCache if others is None else others.join(loaded.model)
        images = reservation.plan.images
        adapters = AdapterSet(loaded, found.with_adapters(loaded), found.adapter_bytes, reservation.take)
        inputs = InputProcessor(
            loaded.tokenizer,
            loaded.model.vocab_size,
            config.max_context,
            default_params(loaded.generation_config),
            GrammarCompiler(loaded.tokenizer, loaded.model.vocab_size),
            found.args.tool_format,
            loaded.model,
            adapters.loaded,
            loaded.vision if isinstance(loaded.vision, str) else loaded.vision.processor,
            images.budget(found.args.min_pixels) if images else DEFAULT_BUDGET,
        )
        return cls(
            args=found.args,
            loaded=loaded,
            config=config,
            reservation=reservation,
            kv=found.kv,
            drafter=drafter,
            adapters=adapters,
            inputs=inputs,
            notes=(
                *_notes(loaded, found.kv),
                *filter(None, [found.kv_note]),
                *_blind_drafts(loaded, drafter),
                *([images.line()] if images and images.limited else []),
            ),
            make_cache=make_cache,
            guard=None if loaded.experts is None else _guard(loaded.experts, reservation),
        )

    def close(self) -> None:
        """Release the memory for other models of this process, and close the file of experts."""
        if self.guard is not None:
            self.guard.close()
        if self.loaded.experts is not None:
            from ..loading.memory.hit_rates import keep_repeated_share  # few models need it

            keep_repeated_share(self.loaded.path, self.loaded.experts.store.stats())
            self.loaded.experts.close()
        self.reservation.release()

    def without_weights(self) -> OpenModel:
        """Return a copy that describes the model and can compute nothing: it has no graph, no draft model and no adapters' weights."""
        gone: Any = None
        seen = self.loaded.vision
        vision = seen if isinstance(seen, str) else replace(seen, tower=gone)
        loaded = replace(self.loaded, model=gone, embedding="", reranking=None, vision=vision, experts=None)
        adapters = AdapterSet(loaded, None, 0, self.reservation.take)
        adapters.loaded.update(self.adapters.loaded)
        return replace(self, loaded=loaded, drafter=None, adapters=adapters, inputs=replace(self.inputs, model=None), guard=None)

    def engine(self) -> Engine:
        """A new engine, with an empty cache."""
        loaded, args = self.loaded, self.args
        head = head_in(args.draft)
        # Pages for other machines need the same name on every machine.
        identify = content_fingerprint if args.kv_producer or args.prefill_from else fingerprint
        drafts = identify(head) if isinstance(head, Path) else head
        name = identify(loaded.path, args.bits, args.group_size, args.gguf_exact, drafts)
        return Engine(
            loaded.model,
            self.config,
            dtype=loaded.dtype,
            kv=self.kv,
            fingerprint=name,
            disk=self._disk(),
            drafter=self.drafter,
            take_memory=self.reservation.take,
            adapted=self.adapters.adapted,
            make_cache=self.make_cache,
            vision=None if isinstance(loaded.vision, str) else loaded.vision,
            check=self._check(name) if kernels_in_use() else None,
            experts=loaded.experts,
        )

    def _check(self, fingerprint: str) -> ReplayCheck:
        from .runner.replay_check import ReplayCheck, replays_file  # only on a GPU

        return ReplayCheck(self.loaded.name, self.loaded.dtype, replays_file(), f"{fingerprint}, kv {self.kv.name}")

    def _disk(self) -> PageSource | None:
        args = self.args
        if args.prefill_from:
            from ..cache.disk.remote import PeerStorage

            return PeerStorage(args.prefill_from, os.environ.get(_KEY_THERE, ""), note=_log.warning)
        if not args.prefix_disk_gb or not args.prefix_cache:
            return None
        from ..cache.disk.storage import DiskStorage

        return DiskStorage(Path(args.prefix_dir or prefix_dir()), int(args.prefix_disk_gb * 2**30), note=_log.warning)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModels:
    """The model, draft model and adapters of `EngineArgs`, of which only headers were read."""

    args: EngineArgs
    target: PreparedModel
    draft: PreparedModel | None
    kv: KVFormat
    kv_note: str
    """Message about how `kv="auto"` was resolved; empty for any other `kv`."""
    adapters: tuple[Adapter, ...] = ()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, with adapters and the vision tower."""
        drafting = self.draft.weight_bytes if self.draft else 0
        return self.target.weight_bytes + vision_bytes(self.target.vision) + self.adapter_bytes + drafting

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the adapters, and of those that may be loaded later. Raises `AdapterError` if one does not fit the model."""
        later = int(self.args.adapter_memory_gb * 1e9)
        if not self.adapters:
            return later
        from ..adapters.places import planned_bytes

        return planned_bytes(self.target.model, self.adapters, self.target.dtype) + later

    def read(self, progress: Progress | None = None, pool_bytes: int | None = None) -> tuple[LoadedModel, Drafter | None]:
        """Read the weights of the model and its draft model; `pool_bytes` as in `PreparedModel.read`. Raises `MLXInferError`s."""
        tokenizer = self.target.load_tokenizer()
        if self.draft is None:
            return self.target.read(tokenizer, progress, pool_bytes), None
        drafting = self.draft.load_tokenizer()
        check_draft(self.draft.model, drafting, tokenizer)
        loaded = self.target.read(tokenizer, progress, pool_bytes)
        return loaded, Drafter.of(loaded, self.draft.read(drafting))

    def with_adapters(self, loaded: LoadedModel) -> AdaptedModel | None:
        """Read the adapters' weights and return the model with them; None without adapters."""
        if not self.adapters:
            return None
        from ..adapters.adapted_model import AdaptedModel

        return AdaptedModel(loaded.model, self.adapters, loaded.dtype)

    def plan(self, memory: DeviceMemory) -> MemoryPlan:
        """Plan the use of this memory. Raises `MemoryPlanError`."""
        return self._plan(memory, self.args)

    def least(self, memory: DeviceMemory) -> int:
        """Minimum bytes of this memory: weights, a step, and one sequence.

        The sequence has `EngineArgs.max_context` tokens, or `GOOD_CONTEXT`, or as many as fit. Raises `MemoryPlanError`.
        """
        most = self.target.model.max_context
        wanted = min(self.args.max_context or GOOD_CONTEXT, most)
        args = replace(self.args, max_context=wanted, max_num_seqs=1, prefix_cache=False)
        plan = self._plan(memory, args)
        if plan.experts is not None:
            plan = self._plan(memory, replace(args, experts_memory=plan.experts.least / 1e9))
        return min(max(plan.used, self._reading(plan)), plan.limit)

    def _reading(self, plan: MemoryPlan) -> int:
        """Return the peak bytes of reading the weights."""
        if plan.experts is not None:
            target = ExpertDemand(layers=self.target.expert_layers).beside(self.target, plan.experts)
            return plan.weights + plan.draft_weights + target.load_bytes
        return self.weight_bytes + max(self.target.load_bytes, self.draft.load_bytes if self.draft else 0)

    def _plan(self, memory: DeviceMemory, args: EngineArgs) -> MemoryPlan:
        return plan_memory(
            self.target,
            draft=self.draft,
            adapter_bytes=self.adapter_bytes,
            max_context=args.max_context,
            max_num_seqs=args.max_num_seqs,
            kv=self.kv,
            memory_gb=args.memory_gb,
            prefix_cache=args.prefix_cache,
            max_draft=args.max_draft,
            deterministic=args.deterministic,
            images=image_memory(self.target.vision, args.max_pixels, args.min_pixels),
            memory=memory,
            experts=expert_demand(self.target.expert_layers, args.experts_memory),
        )


@contextmanager
def prepare_models(args: EngineArgs) -> Iterator[PreparedModels]:
    """Read the headers of a model, its draft model and its adapters. Raises `MLXInferError`s."""
    (kv, kv_note), memory_gb = kv_format(args.kv, args.path_or_id, first16=args.kv_first16), args.memory_gb
    with ExitStack() as opened:
        keys = tuple(args.ignore_config_keys)
        opening = partial(prepare, dtype=args.dtype, gguf_exact=args.gguf_exact, memory_gb=memory_gb, ignore_config_keys=keys)
        mtp = head_in(args.draft)
        pooled = isinstance(args.experts_memory, (int, float)) and args.experts_memory > 0
        own = partial(
            opening, bits=args.bits, group_size=args.group_size, kv=kv, mtp=mtp, vision=args.vision, mmproj=args.mmproj, pooled=pooled
        )
        target = opened.enter_context(own(args.path_or_id))
        draft = opened.enter_context(opening(args.draft, vision="off")) if args.draft is not None and not mtp else None
        check_ignored(keys, *(model.checkpoint.config for model in (target, draft) if model))
        adapters = _opened_adapters(args, target, opened)
        yield PreparedModels(args=args, target=target, draft=draft, kv=kv, kv_note=kv_note, adapters=adapters)


def _opened_adapters(args: EngineArgs, target: PreparedModel, opened: ExitStack) -> tuple[Adapter, ...]:
    if not args.adapters:
        return ()
    from ..adapters.files import open_adapter

    found = []
    for name, path in args.adapters.items():
        found.append(open_adapter(name, path, target.checkpoint.config))
        opened.callback(found[-1].close)
    return tuple(found)


def with_shares(models: Sequence[EngineArgs], part: float = 1.0, *, most: int | None = None) -> list[EngineArgs]:
    """Set `memory_gb` of models that are loaded together: each gets its share of `part` of the free memory, at most `most` bytes in all.

    Raises `MLXInferError`s.
    """
    if not models or (len(models) == 1 and part == 1):
        return list(models)
    found: list[PreparedModels] = []
    for args in models:
        with prepare_models(args) as each:
            found.append(each)  # a plan does not need the open files
    left = BUDGET.left()
    free = max(left.usable - left.reserved, 0)
    memory = replace(left, usable=left.reserved + int(min(free, free if most is None else most) * part))
    sizes = shares([each.weight_bytes for each in found], [each.plan for each in found], memory)
    return [replace(args, memory_gb=size / 1e9) for args, size in zip(models, sizes, strict=True)]


def _guard(experts: PooledExperts, reservation: Reservation) -> PoolGuard:
    from .pool_guard import PoolGuard  # few models need it

    guard = PoolGuard(experts, reservation)
    guard.start()
    return guard


def engine_config(args: EngineArgs, plan: MemoryPlan) -> EngineConfig:
    """The engine's limits: the settings, as far as the memory allows. Raises `SettingError`."""
    if plan.max_num_seqs > plan.rows:
        raise SettingError(f"max_num_seqs must be at most {plan.rows} on this device, the rows of one step, not {args.max_num_seqs}")
    return EngineConfig(
        max_context=plan.context,
        kv_cache_tokens=plan.pool_tokens,
        max_num_batched_tokens=plan.rows,
        max_scored_rows=plan.scored_rows,
        max_num_seqs=plan.max_num_seqs,
        max_waiting=args.max_waiting,
        prefix_cache=args.prefix_cache,
        prefix_cache_tokens=plan.prefix_cache_tokens,
        snapshot_bytes=plan.snapshots * 4 // 5 if plan.draft_weights else plan.snapshots,  # the draft model's cache adds a quarter
        decode_share=args.decode_share,
        max_step_s=args.max_step_s,
        max_draft=args.max_draft,
        ngrams=args.speculate,
        deterministic=args.deterministic,
        image_features_bytes=plan.images.features if plan.images else 0,
    )


def _blind_drafts(loaded: LoadedModel, drafter: Drafter | None) -> list[str]:
    """A note if drafts of requests with images are off."""
    head = loaded.model.mtp
    blind = drafter is not None or (head is not None and head.embedding is not None)
    return (
        ["prompts with images are answered without the draft model, which sees no images"]
        if blind and not isinstance(loaded.vision, str)
        else []
    )


def _notes(loaded: LoadedModel, kv: KVFormat) -> tuple[str, ...]:
    loss, layers, dtype = loss_line(kv), loaded.model.layers, loaded.dtype
    lost = (*small_batch_matmul.TRIAL.lost(), *few_row_experts.TRIAL.lost())
    slower = (*fallback_lines(layers, kv, dtype), *lost, *cuts.fallback_lines(loaded.model.vocab_size))
    missing = [] if is_gpu() else kernels_cpu.missing_lines()
    return (*no_device_lines(), *missing, *loaded.notes, *unquantized_lines(layers, kv, dtype), *slower, *([loss] if loss else []))
