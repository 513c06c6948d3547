"""A path, alias or hub id becomes a model that is ready to run."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import kernels_cpu
from ..cache.kv_format import KVFormat
from ..device import device_memory
from ..errors import UnsupportedModelError
from ..models import Model, build, supports
from ..nn.packing import arrays, settle
from ..nn.weights import Format
from ..tokenizer import tokenizer as tokenizers
from ..tokenizer.no_tokenizer import NoTokenizer, has_tokenizer
from ..tokenizer.tokenizer import Tokenizer
from .checkpoint import Checkpoint
from .directory import SafetensorsCheckpoint
from .files import read_json_if_there
from .formats import check_format, compute_dtype, dtype_name
from .gguf import GGUFCheckpoint
from .memory import check_memory, tensor_bytes
from .repack_cache import RepackCache, open_copies
from .resolve import resolve
from .summary import Summary, summarize
from .weights import CheckpointWeights, MetaWeights, Progress


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, its tokenizer, and what is worth knowing about them. `dtype` is that of computing, `weight_bytes` are in memory."""

    model: Model
    tokenizer: Tokenizer
    config: dict[str, Any]
    generation_config: dict[str, Any]
    path: Path
    name: str
    dtype: mx.Dtype
    weight_bytes: int
    notes: tuple[str, ...]
    summary: Summary


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Loading makes hundreds of thousands of objects that are none: looking through them would be a fifth of the time of a tokenizer."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_garbage_collection()
def load(
    path_or_id: str | Path,
    *,
    dtype: str | mx.Dtype | None = None,
    bits: int | None = None,
    group_size: int | None = None,
    mode: str = "affine",
    kv: KVFormat | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model directory (Hugging Face or MLX), a GGUF file, an alias or a hub id.

    `bits` (or a `mode` other than affine) quantizes matrices that are stored plain; `kv` is what the cache will keep. Everything that can
    be wrong with a checkpoint is found before its weights are read, except NaN. Raises `MLXInferError`.
    """
    quantize = check_format(bits, group_size, mode) if bits is not None or mode != "affine" else None
    found = resolve(path_or_id)
    copies = open_copies(found.path) if quantize is None else None
    fresh = quantize is None and not (copies and copies.found)
    with kernels_cpu.weight_memory(_packed_bytes(found.path) if fresh else 0):
        checkpoint = open_checkpoint(found.path, raw_blocks=quantize is None)
        try:
            compute = compute_dtype(checkpoint, dtype)
            own = supports(model_type(checkpoint))
            read = _plan(checkpoint, compute, quantize, kv, copies) if own else _borrow(checkpoint, compute, quantize, kv)
            tokenizer = load_tokenizer(checkpoint)
            if isinstance(checkpoint, GGUFCheckpoint):
                checkpoint.forget_vocabulary()
            model, notes = read(progress)
            summary = summarize(checkpoint, found.name, model_type(checkpoint), model.max_context, quantize)
        finally:
            checkpoint.close()
    mx.clear_cache()
    if copies:
        copies.keep()
    if isinstance(tokenizer, NoTokenizer):
        notes = [*notes, "there is no tokenizer: prompts and answers are token ids"]
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=checkpoint.config,
        generation_config=generation_config(found.path),
        path=found.path,
        name=found.name,
        dtype=compute,
        weight_bytes=sum(array.nbytes for array in arrays(model)),
        notes=(*model.notes, *notes),
        summary=summary,
    )


def _packed_bytes(path: Path) -> int:
    """What the weights of a GGUF file will hardly exceed, as its blocks are packed as they are; 0 where that would be much before it
    is known whether they fit."""
    size = path.stat().st_size if path.suffix == ".gguf" and path.is_file() else 0
    return size if size <= device_memory().usable // 4 else 0


Read = Callable[[Progress | None], tuple[Model, list[str]]]
"""Reads the weights, and gives the model with what is to be said about it."""


def _plan(checkpoint: Checkpoint, dtype: mx.Dtype, quantize: Format | None, kv: KVFormat | None, copies: RepackCache | None) -> Read:
    """Check everything that the headers tell, and give what reads the weights."""
    planned = MetaWeights(checkpoint, dtype)
    meta_model = build(checkpoint.config, planned)
    planned.finish()
    check_memory(planned, meta_model, dtype, quantize, kv)

    def read(progress: Progress | None) -> tuple[Model, list[str]]:
        weights = CheckpointWeights(checkpoint, dtype, quantize=quantize, progress=progress)
        model = build(checkpoint.config, weights, ready=partial(settle, copies=copies))
        weights.finish()
        return model, _notes(weights)

    return read


def _borrow(checkpoint: Checkpoint, dtype: mx.Dtype, quantize: Format | None, kv: KVFormat | None) -> Read:
    # mlx-lm brings transformers with it, which takes seconds to import.
    from .load_fallback import check_borrowed, load_borrowed

    check_borrowed(checkpoint)
    if quantize:
        raise UnsupportedModelError("a model that runs on mlx-lm's graph cannot be quantized while it is loaded: use mlx_lm.convert first")
    if kv and kv.quantized:
        raise UnsupportedModelError(
            f"{model_type(checkpoint)} has no graph of its own here: it runs with mlx-lm's cache, which is not quantized: use kv 16"
        )
    return lambda progress: (load_borrowed(checkpoint, dtype, progress), [])


def open_checkpoint(path: Path, *, raw_blocks: bool = False) -> Checkpoint:
    """The checkpoint at a resolved path: a directory, or a GGUF file. Raises `CheckpointError`, `UnsupportedModelError`.

    `raw_blocks` is that of `GGUFCheckpoint`, for who packs what is read with `nn.packing.settle`.
    """
    return SafetensorsCheckpoint(path) if path.is_dir() else GGUFCheckpoint(path, raw_blocks=raw_blocks)


def model_type(checkpoint: Checkpoint) -> str:
    """The architecture's name. Raises `UnsupportedModelError` where the config has none."""
    name = checkpoint.config.get("model_type")
    if not isinstance(name, str) or not name:
        raise UnsupportedModelError(f"{checkpoint.path}: config.json has no model_type that names the architecture")
    return name


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer beside the weights, or in the GGUF file. Raises `TokenizerError`."""
    if isinstance(checkpoint, GGUFCheckpoint):
        return tokenizers.from_gguf(checkpoint.metadata)
    if not has_tokenizer(checkpoint.path):
        return NoTokenizer(checkpoint.path, checkpoint.config)
    return tokenizers.from_directory(checkpoint.path)


def generation_config(path: Path) -> dict[str, Any]:
    return read_json_if_there(path / "generation_config.json") if path.is_dir() else {}


def _notes(weights: CheckpointWeights) -> list[str]:
    rounded, skipped = Counter(weights.rounded.values()), Counter(weights.ledger.skipped.values())
    return [
        *(f"{count} tensors were rounded from {stored} to {dtype_name(weights.dtype)}" for stored, count in rounded.items()),
        *(f"{count} tensors are not used: {reason}" for reason, count in skipped.items()),
    ]


@dataclass(frozen=True, slots=True)
class MetaModel:
    """`model` has no weights, and takes `weight_bytes` once it has; it is None where it runs on mlx-lm's graph and cache."""

    name: str
    model_type: str
    dtype: mx.Dtype
    model: Model | None
    weight_bytes: int = 0


def meta_model(path_or_id: str | Path, dtype: str | mx.Dtype | None = None, quantize: Format | None = None) -> MetaModel:
    """Raises `MLXInferError`."""
    found = resolve(path_or_id)
    checkpoint = open_checkpoint(found.path, raw_blocks=quantize is None)
    try:
        compute, kind = compute_dtype(checkpoint, dtype), model_type(checkpoint)
        if not supports(kind):
            return MetaModel(found.name, kind, compute, None)
        planned = MetaWeights(checkpoint, compute)
        model = build(checkpoint.config, planned)
        weights = sum(tensor_bytes(tensor, compute, quantize) for tensor in planned.tensors.values())
        return MetaModel(found.name, kind, compute, model, weights)
    finally:
        checkpoint.close()
