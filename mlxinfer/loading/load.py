"""From a path, alias or hub id to a model that is ready to run: read the headers, then the weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import mlx.core as mx

from .. import kernels_cpu
from ..cache.kv_format import KVFormat
from ..errors import DraftError, UnsupportedModelError
from ..models import Model, build, build_blocks, supports
from ..models.decoder import BlockStack
from ..models.heads.mtp import Head
from ..models.pipeline_stage import Stage
from ..nn.packing import arrays, settle
from ..nn.weights import Format
from ..tokenizer import tokenizer as tokenizers
from ..tokenizer.config_files import has_tokenizer
from ..tokenizer.no_tokenizer import NoTokenizer
from ..tokenizer.tokenizer import Tokenizer
from ..util.dataclass import dataclass
from ..util.device import is_gpu
from ..util.garbage import no_garbage_collection
from .checkpoint import Checkpoint
from .draft_head import WithHead, is_of_head, with_head
from .files import read_json_if_there
from .find.resolve import resolve
from .formats import check_format, compute_dtype, dtype_name, format_text
from .gguf import GGUFCheckpoint
from .gguf.gpu_formats import pack_for_gpu, rounding_notes, scale_dtype, speeds_file
from .memory.plan import plan_memory, usable_memory
from .memory.weight_sizes import SizeChange, size_changes
from .recipes.embedding import EmbeddingRecipe, read_recipe
from .recipes.rerank import RerankRecipe, read_reranking
from .repack_cache import RepackCache, open_copies
from .summary import Summary, summarize
from .weights import CheckpointWeights, MetaWeights, Progress

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights in memory, its tokenizer, and what is worth knowing about them."""

    model: Model
    """The graph, with its weights."""
    tokenizer: Tokenizer
    """Text to token ids and back."""
    config: dict[str, Any]
    """The checkpoint's config.json, or for GGUF one rebuilt from the metadata."""
    generation_config: dict[str, Any]
    """The checkpoint's generation_config.json; empty if there is none."""
    path: Path
    """The file or directory that it was read from."""
    name: str
    """The alias, hub id or file name that the model was asked for by."""
    dtype: mx.Dtype
    """Dtype of the activations."""
    weight_bytes: int
    """Bytes that the weights take in memory."""
    notes: tuple[str, ...]
    """Lines the user should be told."""
    summary: Summary
    """What `models show` prints."""
    embedding: EmbeddingRecipe | str = "it was not loaded from a checkpoint, which says how its states become a vector"
    """How it makes vectors of texts, or why it does not."""
    reranking: RerankRecipe | None = None
    """How it tells relevant documents, if it is a reranker."""
    load_bytes: int = 0
    """As in `PreparedModel`; nothing is left to read."""


ReadWeights = Callable[["Progress | None", "Stage | None"], "tuple[Model, list[str]]"]
"""Reads the weights, of some blocks only where a part is given. Returns the model that has them, and notes for the user."""
ReadBlocks = Callable[["Stage"], "tuple[BlockStack, int]"]
"""Reads some blocks alone. Returns them, and how many bytes of the checkpoint were read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """A model of which only headers were read: `model` has the shapes of its weights, not their values. `prepare` makes it."""

    name: str
    """What the user called it, or its file name."""
    model_type: str
    """The architecture, as in config.json."""
    dtype: mx.Dtype
    """Dtype of the activations, once loaded."""
    model: Model
    """The graph, whose weights have shapes only."""
    borrowed: bool
    """Whether it runs on mlx-lm's graph and cache."""
    weight_bytes: int
    """Bytes that the weights will take in memory."""
    load_bytes: int
    """Bytes needed besides the weights while they are read: the largest tensor once more, for its cast."""
    checkpoint: Checkpoint
    """The open files."""
    quantize: Format | None
    """The format that plain matrices are quantized to; None leaves them."""
    copies: RepackCache | None
    """Repacked matrices of a GGUF file; None where there can be none."""
    read_weights: ReadWeights
    """Reads them."""
    read_blocks: ReadBlocks | None = None
    """Reads some blocks alone; None for a model on mlx-lm's graph."""
    outline: Callable[[Stage], Model] | None = None
    """The graph of a part without values; None for a model on mlx-lm's graph."""
    block_bytes: tuple[int, ...] = ()
    """Bytes that the weights of each block will take in memory."""
    size_changes: tuple[SizeChange, ...] = ()
    """Why the weights take other bytes in memory than in the files."""
    part: Stage | None = None
    """The blocks that this process has, where others have the rest."""

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer, which `read` needs. Raises `TokenizerError`."""
        return load_tokenizer(self.checkpoint)

    def read(self, tokenizer: Tokenizer, progress: Progress | None = None) -> LoadedModel:
        """Read the weights. Raises `WeightsError` for values that are NaN or infinite."""
        checkpoint = self.checkpoint
        if isinstance(checkpoint, GGUFCheckpoint):
            checkpoint.forget_vocabulary()
        model, notes = self.read_weights(progress, self.part)
        mx.clear_cache()
        if self.copies:
            self.copies.keep()
        if isinstance(tokenizer, NoTokenizer):
            notes = [*notes, "there is no tokenizer: prompts and answers are token ids"]
        return LoadedModel(
            model=model,
            tokenizer=tokenizer,
            config=checkpoint.config,
            generation_config=generation_config(checkpoint.path),
            path=checkpoint.path,
            name=self.name,
            dtype=self.dtype,
            weight_bytes=sum(array.nbytes for array in arrays(model)),
            notes=(*model.notes, *notes),
            embedding=read_recipe(checkpoint),
            reranking=read_reranking(checkpoint, self.name, tokenizer),
            summary=summarize(checkpoint, self.name, self.model_type, model.max_context, self.quantize),
        )


class PrepareOptions(TypedDict, total=False):
    """How a model is to be loaded."""

    dtype: str | mx.Dtype | None
    """Dtype of the activations; None: what suits the device."""
    bits: int | None
    """Quantize matrices that are stored plain; None leaves them."""
    group_size: int | None
    """Weights that share a scale, with `bits`."""
    mode: str
    """How to quantize, "affine" unless another of MLX's modes is named, which then takes effect without `bits` too."""
    gguf_exact: bool
    """Unpack types of GGUF that a GPU would otherwise hold rounded."""
    kv: KVFormat | None
    """The format that the cache will have."""
    ignore_config_keys: Sequence[str]
    """Keys of config.json, or of a GGUF file's metadata, that are let pass though they are not understood."""
    memory_gb: float | None
    """The caller's limit, in GB of 10^9 bytes."""
    mtp: bool | Path
    """Load the checkpoint's head that predicts several tokens, or that in another directory."""


@contextmanager
def prepare(path_or_id: str | Path, **options: Unpack[PrepareOptions]) -> Iterator[PreparedModel]:
    """Open a model directory (Hugging Face or MLX), a GGUF file, an alias or a hub id, and check all that its headers say. Weights are
    read by `PreparedModel.read`, inside the `with` block. Raises `MLXInferError`."""
    dtype, kv, memory_gb = options.get("dtype"), options.get("kv"), options.get("memory_gb")
    bits, group_size, mode = options.get("bits"), options.get("group_size"), options.get("mode", "affine")
    gguf_exact = options.get("gguf_exact", False)
    quantize = check_format(bits, group_size, mode) if bits is not None or mode != "affine" else None
    found = resolve(path_or_id)
    copies = open_copies(found.path) if quantize is None else None
    fresh = quantize is None and not (copies and copies.found)
    with no_garbage_collection(), kernels_cpu.weight_memory(_packed_bytes(found.path, memory_gb) if fresh else 0):
        raw = quantize is None and not is_gpu()
        checkpoint = open_checkpoint(found.path, raw_blocks=raw, ignore_config_keys=options.get("ignore_config_keys", ()))
        try:
            compute, own = compute_dtype(checkpoint, dtype), supports(model_type(checkpoint))
            if quantize is None and is_gpu() and isinstance(checkpoint, GGUFCheckpoint):
                pack_for_gpu(checkpoint, compute, exact=gguf_exact, blocks=own)
            if options.get("mtp") and not own:
                raise DraftError(
                    f"{model_type(checkpoint)} runs on mlx-lm's graph, which hands no hidden rows to a head: name a draft model"
                )
            with with_head(checkpoint, options.get("mtp", False)) as (whole, mtp):
                if own:
                    outline = _own_graph(checkpoint, compute, quantize, copies, whole, mtp)
                else:
                    outline = _borrowed(checkpoint, compute, quantize, kv)
                yield PreparedModel(
                    name=found.name,
                    model_type=model_type(checkpoint),
                    dtype=compute,
                    model=outline.model,
                    borrowed=not own,
                    weight_bytes=sum(outline.sizes),
                    load_bytes=max(outline.sizes, default=0),
                    checkpoint=checkpoint,
                    quantize=quantize,
                    copies=copies,
                    read_weights=outline.read,
                    read_blocks=outline.read_blocks,
                    outline=outline.outline,
                    block_bytes=outline.block_bytes,
                    size_changes=outline.size_changes,
                )
        finally:
            checkpoint.close()


def load(path_or_id: str | Path, progress: Progress | None = None, **options: Unpack[PrepareOptions]) -> LoadedModel:
    """`prepare`, a plan of the memory with the engine's defaults, and `read` in one. Raises `MLXInferError`."""
    with prepare(path_or_id, **options) as prepared:
        plan_memory(prepared, kv=options.get("kv"), memory_gb=options.get("memory_gb"))
        return prepared.read(prepared.load_tokenizer(), progress)


def meta_model(path_or_id: str | Path, dtype: str | mx.Dtype | None = None, *, ignore_config_keys: Sequence[str] = ()) -> PreparedModel:
    """A model's headers alone: it can be planned, but not read any more. Raises `MLXInferError`."""
    with prepare(path_or_id, dtype=dtype, ignore_config_keys=ignore_config_keys) as prepared:
        return prepared


def _packed_bytes(path: Path, memory_gb: float | None) -> int:
    """Bytes to reserve for the weights of a GGUF file, which are packed block by block and hardly exceed the file. 0 for a file above a
    quarter of the memory: whether that fits must be known first."""
    size = path.stat().st_size if path.is_file() else 0
    return size if size <= usable_memory(memory_gb) // 4 else 0


@dataclass(frozen=True, slots=True)
class _Outline:
    model: Model
    sizes: list[int]
    """Bytes of each tensor in memory."""
    read: ReadWeights
    read_blocks: ReadBlocks | None = None
    block_bytes: tuple[int, ...] = ()
    outline: Callable[[Stage], Model] | None = None
    size_changes: tuple[SizeChange, ...] = ()


def _own_graph(
    checkpoint: Checkpoint,
    dtype: mx.Dtype,
    quantize: Format | None,
    copies: RepackCache | None,
    whole: Checkpoint,
    mtp: bool | Mapping[str, Any],
) -> _Outline:
    """`whole` is the checkpoint with the tensors of a head; `mtp` as in `build`."""
    meta = MetaWeights(whole, dtype)
    asked: dict[int, int] = {}
    outline = build(checkpoint.config, meta, lambda part: asked.update({id(part): len(meta.tensors)}), mtp=mtp)
    meta.finish()
    if isinstance(whole, WithHead):
        whole.check_used(meta.skipped)

    def weights_of(progress: Progress | None) -> CheckpointWeights:
        return CheckpointWeights(
            whole, dtype, quantize=quantize, scales=scale_dtype(checkpoint, dtype), progress=progress, index=meta.index
        )

    def ready(part: Stage | None) -> Callable[[object], None]:
        # What is packed of a part is no copy of the file.
        return partial(settle, copies=None if part else copies, dtype=dtype, measured=speeds_file())

    def read(progress: Progress | None, part: Stage | None) -> tuple[Model, list[str]]:
        weights = weights_of(progress)
        model = build(checkpoint.config, weights, ready(part), mtp=mtp, part=part)
        weights.finish()
        return model, [*notes, *_notes(weights)]

    def read_blocks(part: Stage) -> tuple[BlockStack, int]:
        weights = weights_of(None)
        stack = build_blocks(checkpoint.config, weights, part, ready(part), dtype)
        weights.finish()
        return stack, weights.read_bytes

    notes = _quantized_before(checkpoint, meta, quantize) if quantize else rounding_notes(checkpoint, meta, dtype)
    sizes = [tensor.nbytes(dtype, quantize) for tensor in meta.tensors.values()]
    ends = [asked[id(block)] for block in outline.blocks]
    starts = [max((n for n in asked.values() if n < ends[0]), default=0), *ends]
    blocks = tuple(sum(sizes[start:end]) for start, end in zip(starts, ends, strict=False))
    if isinstance(outline.mtp, Head) and outline.mtp.output is not None:  # rows of another matrix, which are there twice
        sizes.append(sum(array.nbytes for array in arrays(outline.mtp.output)))
    changes = size_changes(whole, meta, dtype, quantize)
    return _Outline(outline, sizes, read, read_blocks, blocks, lambda part: build(checkpoint.config, meta, mtp=mtp, part=part), changes)


def _quantized_before(checkpoint: Checkpoint, meta: MetaWeights, quantize: Format) -> list[str]:
    """What to tell the user about matrices that `quantize` leaves as they are, or quantizes a second time. Raises `UnsupportedModelError`
    where it would change nothing."""
    changed = [tensor for tensor in meta.tensors.values() if tensor.is_quantized_by(quantize)]
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


def _borrowed(checkpoint: Checkpoint, dtype: mx.Dtype, quantize: Format | None, kv: KVFormat | None) -> _Outline:
    # mlx-lm brings transformers with it, which takes seconds to import.
    from .load_fallback import BorrowedModel

    borrowed = BorrowedModel(checkpoint, dtype)
    if quantize:
        raise UnsupportedModelError("a model that runs on mlx-lm's graph cannot be quantized while it is loaded: use mlx_lm.convert first")
    if kv and kv.quantized:
        raise UnsupportedModelError(
            f"{model_type(checkpoint)} has no graph of its own here: it runs with mlx-lm's cache, which is not quantized: use kv 16"
        )
    return _Outline(borrowed.model, borrowed.sizes, lambda progress, part: (borrowed.read(progress), []))


def open_checkpoint(path: Path, *, raw_blocks: bool = False, ignore_config_keys: Sequence[str] = ()) -> Checkpoint:
    """The checkpoint at a resolved path: a directory, or a GGUF file. Raises `CheckpointError`, `UnsupportedModelError`.

    `raw_blocks`: what is read may be in forms that only the CPU kernels multiply, `RawBlocks` and `FLOAT8`. Set it where
    `nn.packing.settle` packs what is read. `ignore_config_keys` are let pass though no graph understands them.
    """
    if not path.is_dir():
        return GGUFCheckpoint(path, raw_blocks=raw_blocks, ignore_config_keys=ignore_config_keys)
    from .directory import SafetensorsCheckpoint  # a GGUF file does not need it

    return SafetensorsCheckpoint(path, ignore_config_keys, float8=raw_blocks and kernels_cpu.packs_float8())


def model_type(checkpoint: Checkpoint) -> str:
    """The architecture's name. Raises `UnsupportedModelError` where the config has none."""
    name = checkpoint.config.get("model_type")
    if not isinstance(name, str) or not name:
        raise UnsupportedModelError(f"{checkpoint.path}: config.json has no model_type that names the architecture")
    return name


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer next to the weights, or in the GGUF file. Raises `TokenizerError`."""
    if isinstance(checkpoint, GGUFCheckpoint):
        return tokenizers.from_gguf(checkpoint.metadata)
    if not has_tokenizer(checkpoint.path):
        return NoTokenizer(checkpoint.path, checkpoint.config)
    return tokenizers.from_directory(checkpoint.path)


def generation_config(path: Path) -> dict[str, Any]:
    return read_json_if_there(path / "generation_config.json") if path.is_dir() else {}


def _notes(weights: CheckpointWeights) -> list[str]:
    rounded, skipped = Counter(weights.rounded.values()), Counter(weights.index.skipped.values())
    return [
        *(f"{count} tensors were rounded from {stored} to {dtype_name(weights.dtype)}" for stored, count in rounded.items()),
        *(f"{count} tensors are not used: {reason}" for reason, count in skipped.items()),
    ]
