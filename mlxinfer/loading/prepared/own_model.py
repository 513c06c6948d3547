"""Models on the graphs of this package: sizes from the headers, then weights from the files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...errors import UnsupportedModelError
from ...models import Model, build, build_blocks
from ...models.decoder import BlockStack
from ...models.heads.mtp import Head
from ...models.pipeline_stage import Stage
from ...nn.packing import arrays, settle
from ...nn.weights import Format
from ..checkpoint import Checkpoint
from ..draft_head import WithHead, is_of_head
from ..find.resolve import cache_dir
from ..formats import dtype_name, format_text
from ..gguf import GGUFCheckpoint
from ..gguf.mlx_formats import PACKINGS, lossy
from ..memory.weight_sizes import size_changes
from ..repack_cache import RepackCache
from ..weights import CheckpointWeights, MetaWeights, Progress
from .stages import PreparedModel


class OwnModel(PreparedModel):
    """Builds its graph on the headers, to check the checkpoint and plan its memory, and once more on the weights."""

    def __init__(
        self,
        name: str,
        checkpoint: Checkpoint,
        dtype: mx.Dtype,
        quantize: Format | None,
        copies: RepackCache | None,
        whole: Checkpoint,
        mtp: bool | Mapping[str, Any],
    ) -> None:
        """`copies` are the repacked matrices of a GGUF file. `whole` is the checkpoint with the tensors of a draft head; `mtp` as in
        `build`. Raises `WeightsError` with every tensor that is missing, unexpected or of another shape."""
        self.quantize = quantize
        self._copies, self._whole, self._mtp = copies, whole, mtp
        self._meta = meta = MetaWeights(whole, dtype, quantize)
        part_bytes: dict[int, int] = {}
        model = build(checkpoint.config, meta, lambda part: part_bytes.update({id(part): meta.nbytes - sum(part_bytes.values())}), mtp=mtp)
        meta.finish()
        if isinstance(whole, WithHead):
            whole.check_used(meta.skipped)
        self._notes = _quantized_before(checkpoint, meta, quantize) if quantize else list(_rounded_by_packing(checkpoint, meta, dtype))
        sizes = [tensor.nbytes for tensor in meta.tensors.values()]
        if isinstance(model.mtp, Head) and model.mtp.output is not None:  # rows of another matrix, which are in memory twice
            sizes.append(sum(array.nbytes for array in arrays(model.mtp.output)))
        super().__init__(name, checkpoint, dtype, model, sizes)
        self.block_bytes = tuple(part_bytes[id(block)] for block in model.blocks)
        self.size_changes = size_changes(meta)

    def read_weights(self, progress: Progress | None) -> tuple[Model, list[str]]:
        weights = self._weights(progress)
        # The copies of a file have whole matrices only.
        ready = partial(settle, copies=None if self.part else self._copies, dtype=self.dtype, measured=speeds_file())
        model = build(self.checkpoint.config, weights, ready, mtp=self._mtp, part=self.part)
        weights.finish()
        if self._copies:
            self._copies.keep()
        return model, [*self._notes, *_reading_notes(weights)]

    def read_blocks(self, part: Stage) -> tuple[BlockStack, int]:
        weights = self._weights(None)
        ready = partial(settle, dtype=self.dtype, measured=speeds_file())
        stack = build_blocks(self.checkpoint.config, weights, part, ready, self.dtype)
        weights.finish()
        return stack, weights.read_bytes

    def outline(self, part: Stage) -> Model:
        return build(self.checkpoint.config, self._meta, mtp=self._mtp, part=part)

    def _weights(self, progress: Progress | None) -> CheckpointWeights:
        # Affine scales of a GGUF file are float16: bfloat16 would keep 8 of their 11 significant bits.
        halves = isinstance(self.checkpoint, GGUFCheckpoint) and self.checkpoint.packs and self.dtype != mx.float32
        scales = mx.float16 if halves else None
        return CheckpointWeights(self._whole, self.dtype, quantize=self.quantize, scales=scales, progress=progress, index=self._meta.index)


def _quantized_before(checkpoint: Checkpoint, meta: MetaWeights, quantize: Format) -> list[str]:
    """Messages about matrices that `quantize` leaves as they are, or quantizes a second time. Raises `UnsupportedModelError` if it changes
    nothing."""
    changed = [tensor for tensor in meta.tensors.values() if tensor.quantized]
    kept = Counter(format_text(t.stored) for t in meta.tensors.values() if isinstance(t.stored, Format))
    own = [t for t in changed if not is_of_head(t.request.name)]
    kinds = {checkpoint.kind(t.request.sources[0]) for t in own} if isinstance(checkpoint, GGUFCheckpoint) else set()
    if kept and not changed:
        raise UnsupportedModelError(
            f"{checkpoint.path.name} is quantized already ({kept.most_common(1)[0][0]}), so asking for {quantize.bits} bits would change "
            f"nothing: leave that out, or write a requantized model with mlxinfer convert"
        )
    notes = [f"{count} matrices are quantized already and stay {form}" for form, count in kept.items()]
    again = sorted(kind for kind in kinds if kind[:1] not in "FB")
    if again:
        notes.append(f"quantized again to {quantize.bits} bits, which loses more than quantizing once: from {', '.join(again)}")
    return notes


def _rounded_by_packing(checkpoint: Checkpoint, meta: MetaWeights, dtype: mx.Dtype) -> Iterator[str]:
    """Messages about matrices of a GGUF file that are rounded on a GPU, and the loss."""
    if not isinstance(checkpoint, GGUFCheckpoint):
        return
    found: Counter[tuple[str, Format]] = Counter()
    names, kinds = frozenset(checkpoint.names()), lossy(dtype)
    for tensor in meta.tensors.values():
        source = tensor.request.sources[0]
        kind = checkpoint.kind(source) if source in names else ""  # a draft head has a file of its own
        if kind in kinds and isinstance(tensor.stored, Format) and tensor.stored.mode == "affine":
            found[kind, tensor.stored] += 1
    for (kind, form), count in sorted(found.items(), key=lambda item: item[0][0]):
        yield (
            f"{count} {kind} matrices are held in {form.bits} bits in groups of {form.group_size}, at a KL divergence of about "
            f"{PACKINGS[kind].loss:.0e} from the file's numbers; --gguf-exact (gguf_exact=True) unpacks them to 16 bits instead"
        )


def speeds_file() -> Path:
    """File that remembers how fast this machine multiplies each format."""
    return cache_dir() / "products.json"


def _reading_notes(weights: CheckpointWeights) -> list[str]:
    rounded, skipped = Counter(weights.rounded.values()), Counter(weights.index.skipped.values())
    return [
        *(f"{count} tensors were rounded from {stored} to {dtype_name(weights.dtype)}" for stored, count in rounded.items()),
        *(f"{count} tensors are not used: {reason}" for reason, count in skipped.items()),
    ]
