"""How a model is to be loaded and run, and a model that has been: what both front doors begin with."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx

from ..cache.attention.select import fallback_lines
from ..cache.kv_format import KVFormat, loss_line, unquantized_lines
from ..config import MAX_DRAFT, EngineConfig, default_params
from ..errors import MLXInferError
from ..loading.fingerprint import fingerprint
from ..loading.load import LoadedModel, prepare
from ..loading.memory_plan import MAX_SEQUENCES, MemoryPlan, engine_config, plan_memory
from ..loading.resolve import prefix_dir
from ..loading.weights import Progress
from .engine import Engine
from .input_processor import InputProcessor
from .spec_decode.draft_model import Drafter

if TYPE_CHECKING:
    from ..cache.disk.storage import DiskStorage

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """`path_or_id` is a directory (Hugging Face or MLX), a GGUF file, an alias or a hub id. `dtype` is the compute dtype ("float32",
    "bfloat16", "float16"; by default the best one for the device). `kv` is the bits that keys and values are cached in ("16", "8", "4",
    "k8v4"...: docs/kv-cache.md), `kv_first16` keeps each sequence's first page of them unquantized. `bits` and `group_size` quantize at
    load what is not quantized yet. `max_context` bounds the tokens of a sequence, `max_sequences` how many run together, `memory_gb` what
    all of it takes.

    `draft` is a smaller model of the same vocabulary that proposes tokens; `speculate` lets the text itself propose them where it repeats.
    `prefix_cache` keeps what was computed for prompts that begin alike, and `prefix_disk_gb` of it on disk, in `prefix_dir`.
    `deterministic` makes every row independent of its neighbours on devices where it is not (docs/batching.md).
    """

    path_or_id: str | Path
    dtype: str | mx.Dtype | None = None
    kv: str = "16"
    kv_first16: bool = False
    bits: int | None = None
    group_size: int = 64
    max_context: int | None = None
    max_sequences: int = MAX_SEQUENCES
    memory_gb: float | None = None
    draft: str | Path | None = None
    speculate: bool = True
    prefix_cache: bool = True
    prefix_disk_gb: float = 0.0
    prefix_dir: str | Path | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.max_sequences < 1:
            raise MLXInferError(f"max_sequences must be at least 1, not {self.max_sequences}")
        if self.memory_gb is not None and not 0 < self.memory_gb < 1e6:
            raise MLXInferError(f"memory_gb must be a number above 0, not {self.memory_gb}")
        if not 0 <= self.prefix_disk_gb < 1e6:
            raise MLXInferError(f"prefix_disk_gb must be a number from 0, not {self.prefix_disk_gb}")


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model that is ready to run."""

    loaded: LoadedModel
    config: EngineConfig
    kv: KVFormat
    intake: InputProcessor
    drafter: Drafter | None = None
    plan: MemoryPlan | None = None
    """None where the caller made the config."""
    settings: Settings | None = None

    @classmethod
    def open(cls, settings: Settings, progress: Progress | None = None) -> OpenModel:
        """Plan the memory for the model, its draft model and the cache, then read the weights. Raises `MLXInferError`s."""
        s, form = settings, KVFormat.parse(settings.kv, first16=settings.kv_first16)
        max_draft = MAX_DRAFT if s.speculate or s.draft is not None else 0
        with ExitStack() as opened:
            target = opened.enter_context(
                prepare(s.path_or_id, dtype=s.dtype, bits=s.bits, group_size=s.group_size, kv=form, memory_gb=s.memory_gb)
            )
            draft = opened.enter_context(prepare(s.draft, dtype=s.dtype, memory_gb=s.memory_gb)) if s.draft is not None else None
            plan = plan_memory(
                target,
                draft=draft,
                max_context=s.max_context,
                max_sequences=s.max_sequences,
                kv=form,
                memory_gb=s.memory_gb,
                prefix_cache=s.prefix_cache,
                max_draft=max_draft,
            )
            loaded = target.read(progress)
            drafter = Drafter.of(loaded, draft.read()) if draft else None
        plan.apply()
        config = engine_config(plan, prefix_cache=s.prefix_cache, deterministic=s.deterministic, max_draft=max_draft)
        return replace(cls.of(loaded, replace(config, ngrams=s.speculate), form, drafter, plan), settings=s)

    @classmethod
    def of(
        cls, loaded: LoadedModel, config: EngineConfig, kv: KVFormat, drafter: Drafter | None = None, plan: MemoryPlan | None = None
    ) -> OpenModel:
        defaults = default_params(loaded.generation_config)
        return cls(
            loaded, config, kv, InputProcessor(loaded.tokenizer, loaded.model.vocab_size, config.max_context, defaults), drafter, plan
        )

    def engine(self) -> Engine:
        """A new one, with an empty cache."""
        loaded, s = self.loaded, self.settings
        name = fingerprint(loaded.path, *((s.bits, s.group_size) if s else ()))
        return Engine(loaded.model, self.config, dtype=loaded.dtype, kv=self.kv, fingerprint=name, disk=self._disk(), drafter=self.drafter)

    def _disk(self) -> DiskStorage | None:
        s = self.settings
        if s is None or not s.prefix_disk_gb or not s.prefix_cache:
            return None
        from ..cache.disk.storage import DiskStorage

        return DiskStorage(Path(s.prefix_dir or prefix_dir()), int(s.prefix_disk_gb * 2**30), note=_log.warning)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should be told."""
        loss, layers, dtype = loss_line(self.kv), self.loaded.model.layers, self.loaded.dtype
        lines = [*unquantized_lines(layers, self.kv, dtype), *fallback_lines(layers, self.kv, dtype), *([loss] if loss else [])]
        return (*self.loaded.notes, *lines)
