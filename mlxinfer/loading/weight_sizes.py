"""Why a model's weights take other bytes in memory than in its files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import mlx.core as mx

from ..nn.weights import FLOAT8, Format
from .checkpoint import Checkpoint
from .formats import dtype_name, format_text
from .gguf import GGUFCheckpoint
from .weights import MetaWeights, PlannedTensor

_SAID = 1 / 200
"""Share of the bytes in the files from which a difference is said."""


def size_lines(checkpoint: Checkpoint, meta: MetaWeights, dtype: mx.Dtype, quantize: Format | None) -> tuple[str, ...]:
    """A line for each reason that changes the size by more than `_SAID`, after `meta.finish`. Bytes are in GB of 10^9."""
    whole = sum(checkpoint.nbytes(name) for name in checkpoint.names())
    return (*_left_out(checkpoint, meta, whole), *_changed(checkpoint, meta, dtype, quantize, whole))


def _left_out(checkpoint: Checkpoint, meta: MetaWeights, whole: int) -> Iterator[str]:
    sizes: Counter[str] = Counter()
    for name, reason in meta.skipped.items():
        sizes[reason] += checkpoint.nbytes(name)
    for reason, size in sizes.most_common():
        if size > _SAID * whole:
            yield f"{_gb(size)} of the files are not read: {reason}"


def _changed(checkpoint: Checkpoint, meta: MetaWeights, dtype: mx.Dtype, quantize: Format | None, whole: int) -> Iterator[str]:
    stored: Counter[tuple[str, str]] = Counter()
    kept: Counter[tuple[str, str]] = Counter()
    counted: set[str] = set()
    for tensor in meta.tensors.values():
        sources = [source for source in tensor.request.sources if source not in counted]
        counted.update(sources)
        group = checkpoint.kind(tensor.request.sources[0]), _form(checkpoint, tensor, dtype, quantize)
        stored[group] += sum(map(checkpoint.nbytes, sources))
        kept[group] += tensor.nbytes(dtype, quantize)
    for (kind, form), size in kept.most_common():
        before = stored[kind, form]
        if abs(size - before) > _SAID * whole:
            yield f"{_gb(before)} of {kind} become {_gb(size)}: {form}"


def _form(checkpoint: Checkpoint, tensor: PlannedTensor, dtype: mx.Dtype, quantize: Format | None) -> str:
    """What becomes of it, in words."""
    if quantize and tensor.is_quantized_by(quantize):
        return f"quantized to {format_text(quantize)}"
    stored = tensor.stored
    if isinstance(stored, Format) and stored.mode == FLOAT8:
        return "the same codes, with a scale for each row"
    if isinstance(stored, Format):
        return "the same codes, with scales as products here read them"
    becomes = dtype_name(tensor.request.dtype_of(stored, dtype))
    source = tensor.request.sources[0]
    if not isinstance(checkpoint, GGUFCheckpoint) and checkpoint.unpacked_from(source):
        return f"unpacked to {becomes}, as no product here reads them"
    return f"in {becomes}"


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
