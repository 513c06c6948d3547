"""Explains why a model's weights take other bytes in memory than in its files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import mlx.core as mx

from ...nn.weights import FLOAT8, Format
from ...util.dataclass import dataclass
from ..checkpoint import Checkpoint
from ..formats import dtype_name, format_text
from ..gguf import GGUFCheckpoint
from ..weights import MetaWeights, PlannedTensor

_SAID = 1 / 200
"""Smallest difference that is reported, as a share of the bytes in the files."""


@dataclass(frozen=True, slots=True)
class SizeChange:
    """Tensors whose size in memory differs from that in the files."""

    kind: str
    """`Checkpoint.kind` of the tensors; empty for different kinds."""
    stored: int
    """Bytes in the files."""
    kept: int
    """Bytes in memory; 0 if they are not read."""
    reason: str


def size_changes(meta: MetaWeights) -> tuple[SizeChange, ...]:
    """Return one for each reason that changes the size by more than `_SAID`. `meta` must be finished."""
    checkpoint = meta.index.checkpoint
    least = _SAID * sum(checkpoint.nbytes(name) for name in checkpoint.names())
    return (*_left_out(checkpoint, meta, least), *_changed(checkpoint, meta, least))


def _left_out(checkpoint: Checkpoint, meta: MetaWeights, least: float) -> Iterator[SizeChange]:
    sizes: Counter[str] = Counter()
    for name, reason in meta.skipped.items():
        sizes[reason] += checkpoint.nbytes(name)
    for reason, size in sizes.most_common():
        if size > least:
            yield SizeChange("", size, 0, reason)


def _changed(checkpoint: Checkpoint, meta: MetaWeights, least: float) -> Iterator[SizeChange]:
    stored: Counter[tuple[str, str]] = Counter()
    kept: Counter[tuple[str, str]] = Counter()
    counted: set[str] = set()
    for tensor in meta.tensors.values():
        sources = [source for source in tensor.request.sources if source not in counted]
        counted.update(sources)
        group = checkpoint.kind(tensor.request.sources[0]), _form_in_memory(checkpoint, tensor, meta.dtype)
        stored[group] += sum(map(checkpoint.nbytes, sources))
        kept[group] += tensor.nbytes
    for (kind, form), size in kept.most_common():
        before = stored[kind, form]
        if abs(size - before) > least:
            yield SizeChange(kind, before, size, form)


def _form_in_memory(checkpoint: Checkpoint, tensor: PlannedTensor, dtype: mx.Dtype) -> str:
    if tensor.quantized:
        return f"quantized to {format_text(tensor.quantized)}"
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
