"""GGUF files where MLX computes on a GPU: which matrices are packed, in which dtype, and what the user is told of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx

from ...nn.small_batch_matmul import block_kinds
from ...nn.weights import Format
from ..checkpoint import Checkpoint
from ..find.resolve import cache_dir
from ..weights import MetaWeights
from . import GGUFCheckpoint
from .mlx_formats import PACKINGS, lossy


def pack_for_gpu(checkpoint: GGUFCheckpoint, dtype: mx.Dtype, *, exact: bool, blocks: bool) -> None:
    """Choose how the file's matrices are read, for a model that computes in `dtype`.

    Types that packing rounds stay in their blocks, if `blocks` allows it and this machine multiplies them fast enough so
    (`row_products.block_kinds`). Others of them are packed, or with `exact` unpacked.
    """
    kept = block_kinds(dtype, checkpoint.kinds() & lossy(mx.float16), speeds_file()) if blocks else ()
    checkpoint.pack(PACKINGS.keys() - lossy(dtype) if exact else PACKINGS.keys(), kept)


def speeds_file() -> Path:
    """Remembers how fast this machine multiplies each format."""
    return cache_dir() / "products.json"


def scale_dtype(checkpoint: Checkpoint, dtype: mx.Dtype) -> mx.Dtype | None:
    """The dtype of affine scales where it is known: those of a GGUF file are float16, of whose 11 significant bits bfloat16 keeps 8."""
    return mx.float16 if isinstance(checkpoint, GGUFCheckpoint) and checkpoint.packs and dtype != mx.float32 else None


def rounding_notes(checkpoint: Checkpoint, meta: MetaWeights, dtype: mx.Dtype) -> list[str]:
    """Which matrices are not exactly those of the file, and what that costs."""
    if not isinstance(checkpoint, GGUFCheckpoint):
        return []
    return list(_rounded(checkpoint, meta, lossy(dtype)))


def _rounded(checkpoint: GGUFCheckpoint, meta: MetaWeights, kinds: frozenset[str]) -> Iterator[str]:
    found: Counter[tuple[str, Format]] = Counter()
    names = frozenset(checkpoint.names())
    for tensor in meta.tensors.values():
        source = tensor.request.sources[0]
        kind = checkpoint.kind(source) if source in names else ""  # a head that drafts has a file of its own
        if kind in kinds and isinstance(tensor.stored, Format) and tensor.stored.mode == "affine":
            found[kind, tensor.stored] += 1
    for (kind, form), count in sorted(found.items(), key=lambda item: item[0][0]):
        yield (
            f"{count} {kind} matrices are held in {form.bits} bits in groups of {form.group_size}, at a KL divergence of about "
            f"{PACKINGS[kind].loss:.0e} from the file's numbers; --gguf-exact (gguf_exact=True) unpacks them to 16 bits instead"
        )
