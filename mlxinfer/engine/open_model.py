"""A model that was opened as `EngineArgs` say: what both front doors begin with."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..cache.attention.select import fallback_lines
from ..cache.kv_format import KVFormat, loss_line, unquantized_lines
from ..config import EngineArgs, EngineConfig, default_params
from ..errors import SettingError
from ..loading.fingerprint import fingerprint
from ..loading.load import LoadedModel, prepare
from ..loading.memory_plan import MemoryPlan, plan_memory
from ..loading.resolve import prefix_dir
from ..loading.weights import Progress
from ..nn import row_products
from ..tokenizer.tokenizer import Tokenizer
from ..types import SamplingParams
from .engine import Engine
from .input_processor import InputProcessor
from .spec_decode.draft_model import Drafter

if TYPE_CHECKING:
    from ..cache.disk.storage import DiskStorage

_log = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenModel:
    """A model that is ready to run."""

    args: EngineArgs
    """What was asked for."""
    loaded: LoadedModel
    """The model, its tokenizer and its weights."""
    config: EngineConfig
    """What the engine runs with, after memory was planned."""
    plan: MemoryPlan
    """What the memory is used for."""
    kv: KVFormat
    """The format of cached keys and values."""
    drafter: Drafter | None
    """The draft model; None without one."""
    inputs: InputProcessor
    """Makes sequences of prompts."""
    info: ModelInfo
    """What the front doors tell about the model."""

    @classmethod
    def open(cls, args: EngineArgs, progress: Progress | None = None) -> OpenModel:
        """Plan the memory for the model, its draft model and the cache, then read the weights. Raises `MLXInferError`s."""
        kv, memory_gb = KVFormat.parse(args.kv, first16=args.kv_first16), args.memory_gb
        with ExitStack() as opened:
            prepared = partial(prepare, dtype=args.dtype, gguf_exact=args.gguf_exact, memory_gb=memory_gb)
            target = opened.enter_context(prepared(args.path_or_id, bits=args.bits, group_size=args.group_size, kv=kv))
            draft = opened.enter_context(prepared(args.draft)) if args.draft is not None else None
            plan = plan_memory(
                target,
                draft=draft,
                max_context=args.max_context,
                max_sequences=args.max_num_seqs,
                kv=kv,
                memory_gb=memory_gb,
                prefix_cache=args.prefix_cache,
                max_draft=args.max_draft,
            )
            config = engine_config(args, plan)
            loaded = target.read(progress)
            drafter = Drafter.of(loaded, draft.read()) if draft else None
        plan.apply()
        return cls._of(args, loaded, config, plan, kv, drafter)

    @classmethod
    def _of(
        cls, args: EngineArgs, loaded: LoadedModel, config: EngineConfig, plan: MemoryPlan, kv: KVFormat, drafter: Drafter | None
    ) -> OpenModel:
        inputs = InputProcessor(loaded.tokenizer, loaded.model.vocab_size, config.max_context, default_params(loaded.generation_config))
        info = ModelInfo(
            name=loaded.name,
            tokenizer=loaded.tokenizer,
            config=loaded.config,
            dtype=loaded.dtype,
            kv=kv,
            weight_bytes=loaded.weight_bytes,
            max_context=config.max_context,
            default_params=inputs.default_params,
            plan=plan,
            notes=_notes(loaded, kv),
        )
        return cls(args=args, loaded=loaded, config=config, plan=plan, kv=kv, drafter=drafter, inputs=inputs, info=info)

    def engine(self) -> Engine:
        """A new engine, with an empty cache."""
        loaded, args = self.loaded, self.args
        name = fingerprint(loaded.path, args.bits, args.group_size, args.gguf_exact)
        return Engine(loaded.model, self.config, dtype=loaded.dtype, kv=self.kv, fingerprint=name, disk=self._disk(), drafter=self.drafter)

    def _disk(self) -> DiskStorage | None:
        args = self.args
        if not args.prefix_disk_gb or not args.prefix_cache:
            return None
        from ..cache.disk.storage import DiskStorage

        return DiskStorage(Path(args.prefix_dir or prefix_dir()), int(args.prefix_disk_gb * 2**30), note=_log.warning)


def engine_config(args: EngineArgs, plan: MemoryPlan) -> EngineConfig:
    """What was set, as far as the memory allows it. Raises `SettingError`."""
    if plan.max_sequences > plan.rows:
        raise SettingError(f"max_num_seqs must be at most {plan.rows} on this device, the rows of one step, not {args.max_num_seqs}")
    return EngineConfig(
        max_context=plan.context,
        kv_cache_tokens=plan.pool_tokens,
        max_num_batched_tokens=plan.rows,
        max_num_seqs=plan.max_sequences,
        max_waiting=args.max_waiting,
        prefix_cache=args.prefix_cache,
        prefix_cache_tokens=plan.prefix_cache_tokens,
        snapshot_bytes=plan.snapshots,
        decode_share=args.decode_share,
        max_step_s=args.max_step_s,
        max_draft=args.max_draft,
        ngrams=args.speculate,
        deterministic=args.deterministic,
    )


def _notes(loaded: LoadedModel, kv: KVFormat) -> tuple[str, ...]:
    loss, layers, dtype = loss_line(kv), loaded.model.layers, loaded.dtype
    plain = (*fallback_lines(layers, kv, dtype), *row_products.fallback_lines())
    return (*loaded.notes, *unquantized_lines(layers, kv, dtype), *plain, *([loss] if loss else []))
