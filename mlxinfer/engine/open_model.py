"""A model that was opened as `EngineArgs` say: what both front doors begin with."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx

from ..cache.attention.select import fallback_lines
from ..cache.kv_format import KVFormat, loss_line, unquantized_lines
from ..cache.paged import PagedCache
from ..config import EngineArgs, EngineConfig, default_params
from ..errors import SettingError
from ..loading.draft_head import head_in
from ..loading.find.resolve import prefix_dir
from ..loading.fingerprint import content_fingerprint, fingerprint
from ..loading.load import LoadedModel, PreparedModel, prepare
from ..loading.memory.budget import BUDGET, Reservation, shares
from ..loading.memory.kv_choice import kv_format
from ..loading.memory.plan import GOOD_CONTEXT, MemoryPlan, plan_memory
from ..loading.weights import Progress
from ..models.config_reader import check_ignored
from ..models.decoder import Model
from ..nn import small_batch_matmul as row_products
from ..sampling import top_k_top_p as cuts
from ..structured_output.grammar import GrammarCompiler
from ..tokenizer.tokenizer import Tokenizer
from ..types import SamplingParams
from ..util.dataclass import dataclass
from ..util.device import DeviceMemory
from .adapter_set import AdapterSet
from .core.engine import Engine
from .spec_decode.draft_model import Drafter, check_draft
from .text.input_processor import InputProcessor

if TYPE_CHECKING:
    from ..adapters.adapted_model import AdaptedModel, LoadedAdapter
    from ..adapters.update import Adapter
    from ..cache.disk.backend import PageSource

_log = logging.getLogger(__name__)
_KEY_THERE = "MLXINFER_PREFILL_API_KEY"
"""The environment's variable with the key of the server that reads prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What may be told of a model, also after its memory was given back."""

    name: str
    """The alias, hub id or file name that it was asked for by."""
    tokenizer: Tokenizer
    """The model's tokenizer, with its chat template."""
    config: dict[str, Any]
    """The checkpoint's config.json, or one made from the metadata of a GGUF file."""
    dtype: mx.Dtype
    """The dtype of activations."""
    kv: KVFormat
    """The format of cached keys and values."""
    weight_bytes: int
    """Bytes that the weights take in memory, without a draft model's."""
    max_context: int
    """Longest sequence, prompt and answer together, in tokens."""
    default_params: SamplingParams
    """What a request gets where it leaves out `params` or a field of them."""
    plan: MemoryPlan
    """What the memory is used for."""
    notes: tuple[str, ...]
    """Lines that the user should be told."""
    adapters: Mapping[str, LoadedAdapter] = field(default_factory=dict)
    """The adapters that requests can ask for now, by name."""


class OtherMachines(Protocol):
    """Machines that have the rest of a model."""

    def share(self, found: Prepared) -> Prepared:
        """The same with this machine's part of the model only. Raises `MLXInferError` where they do not agree on that."""
        ...

    def limited(self, config: EngineConfig) -> EngineConfig:
        """What all of them have room for."""
        ...

    def join(self, model: Model) -> Callable[..., PagedCache]:
        """Wait until they have read their parts, and connect the model with those. Returns what makes its caches."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenModel:
    """A model that is ready to run."""

    args: EngineArgs
    """What was asked for."""
    loaded: LoadedModel
    """The model, its tokenizer and its weights."""
    config: EngineConfig
    """What the engine runs with, after memory was planned."""
    reservation: Reservation
    """The memory that it may use."""
    kv: KVFormat
    """The format of cached keys and values."""
    drafter: Drafter | None
    """The draft model; None without one."""
    adapters: AdapterSet
    """The adapters that requests can ask for."""
    inputs: InputProcessor
    """Makes sequences of prompts."""
    info: ModelInfo
    """What the front doors tell about the model."""
    make_cache: Callable[..., PagedCache] = PagedCache
    """Makes the cache of each new engine."""

    @classmethod
    def open(cls, args: EngineArgs, progress: Progress | None = None, others: OtherMachines | None = None) -> OpenModel:
        """Plan the memory for the model, its draft model and the cache, then read the weights, those of a part of the model where `others`
        have the rest. Raises `MLXInferError`s."""
        if args.tool_format is not None:
            from ..output_format.detect import check_format_name

            check_format_name(args.tool_format)
        with prepared(args) as found:
            if others is not None:
                found = others.share(found)
            reservation = BUDGET.reserve(found.plan)
            try:
                config = engine_config(args, reservation.plan)
                if others is not None:
                    config = others.limited(config)
                tokenizer = found.target.load_tokenizer()
                if found.draft is None:
                    return cls._of(found, found.target.read(tokenizer, progress), config, reservation, None, others)
                drafting = found.draft.load_tokenizer()
                check_draft(found.draft.model, drafting, tokenizer)
                loaded, draft = found.target.read(tokenizer, progress), found.draft.read(drafting)
                return cls._of(found, loaded, config, reservation, Drafter.of(loaded, draft), others)
            except BaseException:
                reservation.release()
                raise

    @classmethod
    def _of(
        cls,
        found: Prepared,
        loaded: LoadedModel,
        config: EngineConfig,
        reservation: Reservation,
        drafter: Drafter | None,
        others: OtherMachines | None,
    ) -> OpenModel:
        args, kv = found.args, found.kv
        vocab_size = loaded.model.vocab_size
        grammars = GrammarCompiler(loaded.tokenizer, vocab_size)
        recommended = default_params(loaded.generation_config)
        make_cache = PagedCache if others is None else others.join(loaded.model)
        adapters = AdapterSet(loaded, found.with_adapters(loaded), found.adapter_bytes, reservation.take)
        inputs = InputProcessor(
            loaded.tokenizer,
            vocab_size,
            config.max_context,
            recommended,
            grammars,
            args.tool_format,
            loaded.model,
            adapters.loaded,
        )
        info = ModelInfo(
            name=loaded.name,
            tokenizer=loaded.tokenizer,
            config=loaded.config,
            dtype=loaded.dtype,
            kv=kv,
            weight_bytes=loaded.weight_bytes,
            max_context=config.max_context,
            default_params=inputs.default_params,
            plan=reservation.plan,
            notes=(*_notes(loaded, kv), *filter(None, [found.kv_note])),
            adapters=adapters.loaded,
        )
        return cls(
            args=args,
            loaded=loaded,
            config=config,
            reservation=reservation,
            kv=kv,
            drafter=drafter,
            adapters=adapters,
            inputs=inputs,
            info=info,
            make_cache=make_cache,
        )

    def close(self) -> None:
        """Let other models of this process have the memory."""
        self.reservation.release()

    def engine(self) -> Engine:
        """A new engine, with an empty cache."""
        loaded, args = self.loaded, self.args
        head = head_in(args.draft)
        # What is handed to other machines must be called the same there.
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
        )

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
class Prepared:
    """What `EngineArgs` name, before a weight is read."""

    args: EngineArgs
    """What was asked for."""
    target: PreparedModel
    """The model."""
    draft: PreparedModel | None
    """The draft model; None without one."""
    kv: KVFormat
    """The format of cached keys and values."""
    kv_note: str
    """What to tell the user of how it was chosen; empty where it was asked for."""
    adapters: tuple[Adapter, ...] = ()
    """The adapters, of which only headers were read."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, those of adapters included."""
        return self.target.weight_bytes + self.adapter_bytes + (self.draft.weight_bytes if self.draft else 0)

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the adapters, and of those that may be loaded later. Raises `AdapterError` for one that does not fit the model."""
        later = int(self.args.adapter_memory_gb * 1e9)
        if not self.adapters:
            return later
        from ..adapters.places import planned_bytes

        return planned_bytes(self.target.model, self.adapters, self.target.dtype) + later

    def with_adapters(self, loaded: LoadedModel) -> AdaptedModel | None:
        """The model with its adapters, whose numbers are read here; None without any."""
        if not self.adapters:
            return None
        from ..adapters.adapted_model import AdaptedModel

        return AdaptedModel(loaded.model, self.adapters, loaded.dtype)

    def plan(self, memory: DeviceMemory) -> MemoryPlan:
        """What this memory is used for. Raises `MemoryPlanError`."""
        return self._plan(memory, self.args)

    def least(self, memory: DeviceMemory) -> int:
        """Bytes of this memory that the model must have: its weights, a step, and one sequence of the length that was asked for, or of
        `GOOD_CONTEXT` tokens, or of as many as fit. Raises `MemoryPlanError`."""
        most = self.target.model.max_context
        wanted = min(self.args.max_context or GOOD_CONTEXT, most)
        plan = self._plan(memory, replace(self.args, max_context=wanted, max_num_seqs=1, prefix_cache=False))
        reading = self.weight_bytes + max(self.target.load_bytes, self.draft.load_bytes if self.draft else 0)
        return min(max(plan.used, reading), plan.limit)

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
            memory=memory,
        )


@contextmanager
def prepared(args: EngineArgs) -> Iterator[Prepared]:
    """Read the headers of a model and its draft model. Raises `MLXInferError`s."""
    (kv, kv_note), memory_gb = kv_format(args.kv, args.path_or_id, first16=args.kv_first16), args.memory_gb
    with ExitStack() as opened:
        keys = tuple(args.ignore_config_keys)
        opening = partial(prepare, dtype=args.dtype, gguf_exact=args.gguf_exact, memory_gb=memory_gb, ignore_config_keys=keys)
        mtp = head_in(args.draft)
        target = opened.enter_context(opening(args.path_or_id, bits=args.bits, group_size=args.group_size, kv=kv, mtp=mtp))
        draft = opened.enter_context(opening(args.draft)) if args.draft is not None and not mtp else None
        check_ignored(keys, *(model.checkpoint.config for model in (target, draft) if model))
        adapters = _opened_adapters(args, target, opened)
        yield Prepared(args=args, target=target, draft=draft, kv=kv, kv_note=kv_note, adapters=adapters)


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
    """The same for models that are to be loaded together: each gets its share of this `part` of the memory that is left, or of `most`
    bytes if that is less. Raises `MLXInferError`s."""
    if not models or (len(models) == 1 and part == 1):
        return list(models)
    found: list[Prepared] = []
    for args in models:
        with prepared(args) as each:
            found.append(each)  # its files are closed, which a plan does not need
    left = BUDGET.left()
    free = max(left.usable - left.reserved, 0)
    memory = replace(left, usable=left.reserved + int(min(free, free if most is None else most) * part))
    sizes = shares([each.weight_bytes for each in found], [each.plan for each in found], memory)
    return [replace(args, memory_gb=size / 1e9) for args, size in zip(models, sizes, strict=True)]


def engine_config(args: EngineArgs, plan: MemoryPlan) -> EngineConfig:
    """What was set, as far as the memory allows it. Raises `SettingError`."""
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
        snapshot_bytes=plan.snapshots * 4 // 5 if plan.draft_weights else plan.snapshots,  # the draft model's cache has a quarter more
        decode_share=args.decode_share,
        max_step_s=args.max_step_s,
        max_draft=args.max_draft,
        ngrams=args.speculate,
        deterministic=args.deterministic,
    )


def _notes(loaded: LoadedModel, kv: KVFormat) -> tuple[str, ...]:
    loss, layers, dtype = loss_line(kv), loaded.model.layers, loaded.dtype
    slower = (*fallback_lines(layers, kv, dtype), *row_products.TRIAL.lost(), *cuts.fallback_lines(loaded.model.vocab_size))
    return (*loaded.notes, *unquantized_lines(layers, kv, dtype), *slower, *([loss] if loss else []))
