"""A path, alias or hub id becomes a model that is ready to run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..models import Model, build
from ..nn.tree import arrays
from ..tokenizer import tokenizer as tokenizers
from ..tokenizer.tokenizer import Tokenizer
from .checkpoint import Checkpoint
from .directory import SafetensorsCheckpoint
from .dtypes import compute_dtype, dtype_name
from .files import read_json_if_there
from .gguf import GGUFCheckpoint
from .memory import check_memory
from .no_tokenizer import NoTokenizer, has_tokenizer
from .planned import PlannedWeights
from .quantization import check_format
from .resolve import resolve
from .weights import CheckpointWeights, Progress


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


def load(
    path_or_id: str | Path,
    *,
    dtype: str | mx.Dtype | None = None,
    bits: int | None = None,
    group_size: int | None = None,
    mode: str = "affine",
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model directory (Hugging Face or MLX), a GGUF file, an alias or a hub id.

    `bits` (or a `mode` other than affine) quantizes matrices that are stored plain. Everything that can be wrong with a checkpoint
    is found before its weights are read, except NaN. Raises `MLXInferError`.
    """
    quantize = check_format(bits, group_size, mode) if bits is not None or mode != "affine" else None
    found = resolve(path_or_id)
    checkpoint = open_checkpoint(found.path)
    try:
        compute = compute_dtype(checkpoint, dtype)
        planned = PlannedWeights(checkpoint, compute)
        outline = build(checkpoint.config, planned)
        planned.finish()
        check_memory(planned, outline, compute, quantize)
        del outline
        tokenizer = load_tokenizer(checkpoint)
        weights = CheckpointWeights(checkpoint, compute, quantize=quantize, progress=progress)
        model = build(checkpoint.config, weights, ready=_evaluate)
        weights.finish()
    finally:
        checkpoint.close()
    mx.clear_cache()
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=checkpoint.config,
        generation_config=generation_config(found.path),
        path=found.path,
        name=found.name,
        dtype=compute,
        weight_bytes=sum(array.nbytes for array in arrays(model)),
        notes=(*model.notes, *_notes(weights, tokenizer)),
    )


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at a resolved path: a directory, or a GGUF file. Raises `CheckpointError`, `UnsupportedModelError`."""
    return SafetensorsCheckpoint(path) if path.is_dir() else GGUFCheckpoint(path)


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer beside the weights, or in the GGUF file. Raises `TokenizerError`."""
    if isinstance(checkpoint, GGUFCheckpoint):
        return tokenizers.from_gguf(checkpoint.metadata)
    if not has_tokenizer(checkpoint.path):
        return NoTokenizer(checkpoint.path, checkpoint.config)
    return tokenizers.from_directory(checkpoint.path)


def generation_config(path: Path) -> dict[str, Any]:
    return read_json_if_there(path / "generation_config.json") if path.is_dir() else {}


def _evaluate(part: object) -> None:
    mx.eval(list(arrays(part)))


def _notes(weights: CheckpointWeights, tokenizer: Tokenizer) -> list[str]:
    rounded, skipped = Counter(weights.rounded.values()), Counter(weights.ledger.skipped.values())
    return [
        *(["there is no tokenizer: prompts and answers are token ids"] if isinstance(tokenizer, NoTokenizer) else []),
        *(f"{count} tensors were rounded from {stored} to {dtype_name(weights.dtype)}" for stored, count in rounded.items()),
        *(f"{count} tensors are not used: {reason}" for reason, count in skipped.items()),
    ]
