"""How a model is to be loaded and run, and a model that has been: what both front doors begin with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from ..cache.backend import fallback_lines
from ..cache.format import KVFormat
from ..cache.quality import loss_line
from ..cache.report import unquantized_lines
from ..config import MAX_DRAFT, EngineConfig
from ..loading.identity import identity
from ..loading.load import LoadedModel, load
from ..loading.weights import Progress
from .defaults import default_params
from .engine import Engine
from .intake import Intake
from .plan import MAX_SEQUENCES, MemoryPlan, engine_config, plan_memory


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


@dataclass(frozen=True, slots=True)
class Opened:
    """A model that is ready to run."""

    loaded: LoadedModel
    config: EngineConfig
    kv: KVFormat
    intake: Intake
    plan: MemoryPlan | None = None
    """None where the caller made the config."""

    @classmethod
    def open(cls, settings: Settings, progress: Progress | None = None) -> Opened:
        """Load and plan. Raises `MLXInferError`s."""
        s, form = settings, KVFormat.parse(settings.kv, first16=settings.kv_first16)
        loaded = load(s.path_or_id, dtype=s.dtype, bits=s.bits, group_size=s.group_size, kv=form, progress=progress)
        max_draft = MAX_DRAFT if s.speculate else 0
        plan = plan_memory(
            loaded,
            max_context=s.max_context,
            max_sequences=s.max_sequences,
            kv=form,
            memory_gb=s.memory_gb,
            prefix_cache=s.prefix_cache,
            max_draft=max_draft,
        )
        plan.apply()
        config = engine_config(plan, prefix_cache=s.prefix_cache, deterministic=s.deterministic, max_draft=max_draft)
        return cls.of(loaded, config, form, plan)

    @classmethod
    def of(cls, loaded: LoadedModel, config: EngineConfig, kv: KVFormat, plan: MemoryPlan | None = None) -> Opened:
        defaults = default_params(loaded.generation_config)
        return cls(loaded, config, kv, Intake(loaded.tokenizer, loaded.model.vocab_size, config.max_context, defaults), plan)

    def engine(self) -> Engine:
        """A new one, with an empty cache."""
        return Engine(self.loaded.model, self.config, dtype=self.loaded.dtype, kv=self.kv, identity=identity(self.loaded.path))

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should be told."""
        loss, layers, dtype = loss_line(self.kv), self.loaded.model.layers, self.loaded.dtype
        lines = [*unquantized_lines(layers, self.kv, dtype), *fallback_lines(layers, self.kv, dtype), *([loss] if loss else [])]
        return (*self.loaded.notes, *lines)
