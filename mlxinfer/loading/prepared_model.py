"""The stages of a model before it runs: prepared, with headers only, then loaded, with weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..errors import UnsupportedModelError
from ..models import Model, build, build_blocks
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
from ..util.device import clear_cache
from .checkpoint import Checkpoint
from .draft_head import WithHead, is_of_head
from .files import read_json_if_there
from .formats import dtype_name, format_text
from .gguf import GGUFCheckpoint
from .gguf.mlx_formats import PACKINGS, lossy
from .memory.experts import ExpertLayer, expert_layers, layers_in
from .memory.weight_sizes import SizeChange, size_changes
from .recipes.embedding import EmbeddingRecipe, read_recipe
from .recipes.rerank import RerankRecipe, read_reranking
from .repack_cache import RepackCache
from .summary import Summary, summarize
from .vision import PreparedVision, Vision, prepare_vision, unseen, vision_bytes, vision_notes
from .weights import CheckpointWeights, MetaWeights, Progress, TensorIndex

if TYPE_CHECKING:
    from typing_extensions import Self

    from .repack_cache.pooled_experts import PooledExperts


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights in memory, and its tokenizer."""

    model: Model
    """The graph, with its weights."""
    tokenizer: Tokenizer
    """Text to token ids and back."""
    config: dict[str, Any]
    """The checkpoint's config.json, or for GGUF one rebuilt from the metadata."""
    generation_config: dict[str, Any]
    """The checkpoint's generation_config.json; empty if there is none."""
    dtype: mx.Dtype
    """Dtype of the activations."""
    weight_bytes: int
    """Bytes of the weights in memory."""
    notes: tuple[str, ...]
    """Messages for the user."""
    summary: Summary
    """Contents of the files, for `models show`."""
    embedding: EmbeddingRecipe | str = "it was not loaded from a checkpoint, which says how its states become a vector"
    """Recipe for vectors of texts, or the reason for none."""
    reranking: RerankRecipe | None = None
    """Recipe for scores of documents; None if the model is not a reranker."""
    vision: Vision | str = "the model cannot see images: it was not loaded from a checkpoint"
    """The tower and its pre-processing, or a sentence with the reason why the model cannot see images."""
    experts: PooledExperts | None = None
    """Pools of the routed experts; None if all are resident."""

    @property
    def name(self) -> str:
        """The alias, hub id or file name that the caller gave."""
        return self.summary.name

    @property
    def path(self) -> Path:
        """The file or directory that it was read from."""
        return self.summary.path

    @property
    def load_bytes(self) -> int:
        """0: nothing is left to read. See `PreparedModel`."""
        return 0


class PreparedModel:
    """A model of which only headers were read: `model` has the shapes of its weights, not their values. `prepare` makes it."""

    borrowed = False
    """True if it runs on mlx-lm's graph and cache."""
    quantize: Format | None = None
    """Format that plain matrices are quantized to; None leaves them as stored."""
    block_bytes: tuple[int, ...] = ()
    """Bytes of each block's weights in memory."""
    index: TensorIndex | None = None
    """Tensors that the graph uses and leaves; None for a borrowed model."""
    expert_layers: tuple[ExpertLayer, ...] = ()
    """Layers of `model` with routed experts, which may stay in a file."""
    part: Stage | None = None
    """Blocks of this process, if others have the rest."""
    vision: PreparedVision | str = "the model cannot see images: its tower was not looked for"
    """The tower, or a sentence with the reason why the model cannot see images."""

    def __init__(self, name: str, checkpoint: Checkpoint, dtype: mx.Dtype, model: Model, sizes: Sequence[int]) -> None:
        """`name` is the caller's name of the model, `dtype` that of the activations, `sizes` are the bytes of each tensor in memory."""
        self.name = name
        self.model_type = model_type(checkpoint)
        """The architecture, as in config.json."""
        self.dtype = dtype
        self.model = model
        """The graph, whose weights have shapes only."""
        self.weight_bytes = sum(sizes)
        self.load_bytes = max(sizes, default=0)
        """Bytes needed besides the weights while they are read: the largest tensor once more, for its cast."""
        self.checkpoint = checkpoint
        """The open files."""

    @property
    def size_changes(self) -> tuple[SizeChange, ...]:
        """Reasons for weights that take other bytes in memory than in the files."""
        return ()

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer, which `read` needs. Raises `TokenizerError`."""
        return load_tokenizer(self.checkpoint)

    def read(self, tokenizer: Tokenizer, progress: Progress | None = None, pool_bytes: int | None = None) -> LoadedModel:
        """Read the weights. With `pool_bytes`, routed experts stay in a file besides those in pools of so many bytes.

        Raises `WeightsError` for values that are NaN or infinite, and `ExpertFileError` if the file cannot be written.
        """
        checkpoint = self.checkpoint
        if isinstance(checkpoint, GGUFCheckpoint):
            checkpoint.forget_vocabulary()
        experts = None if pool_bytes is None else self.open_experts(pool_bytes, progress)
        model, notes = self.read_weights(progress, experts)
        vision = self.vision if isinstance(self.vision, str) else self.vision.read(progress)
        clear_cache()
        if isinstance(tokenizer, NoTokenizer):
            notes = [*notes, "there is no tokenizer: prompts and answers are token ids"]
        return LoadedModel(
            model=model,
            tokenizer=tokenizer,
            config=checkpoint.config,
            generation_config=generation_config(checkpoint.path),
            dtype=self.dtype,
            weight_bytes=sum(array.nbytes for array in arrays(model)),
            notes=(*model.notes, *vision_notes(checkpoint, vision), *notes),
            embedding=read_recipe(checkpoint),
            reranking=read_reranking(checkpoint, self.name, tokenizer),
            summary=replace(
                summarize(checkpoint, self.name, self.model_type, model.max_context, self.quantize),
                tower_bytes=vision_bytes(self.vision),
                blind=self.vision if isinstance(self.vision, str) else "",
            ),
            vision=vision,
            experts=experts,
        )

    def open_experts(self, nbytes: int, progress: Progress | None) -> PooledExperts | None:
        """Open pools of `nbytes` for the routed experts; None for a model that cannot have any."""
        return None

    def open_vision(self, mode: str, mmproj: str | Path | None = None) -> None:
        """Set `vision` as `EngineArgs.vision` says. Raises `UnsupportedModelError` with the mode "on" if the model cannot see images."""
        index = self.index
        if index is None:
            self.vision = unseen(f"{self.model_type} runs on mlx-lm's graph, which takes no images")
            if mode == "on":
                raise UnsupportedModelError(self.vision)
            return
        self.vision = prepare_vision(self.checkpoint, index, self.dtype, mode, mmproj)

    def close_vision(self) -> None:
        """Close the files of a tower that has files of its own."""
        if not isinstance(self.vision, str):
            self.vision.close()

    def read_weights(self, progress: Progress | None, experts: PooledExperts | None = None) -> tuple[Model, list[str]]:
        """Return the graph of `part`, with weights and the pools of `experts`, and messages for the user."""
        raise NotImplementedError

    def read_blocks(self, part: Stage, experts: PooledExperts | None = None) -> tuple[BlockStack, int]:
        """Return the blocks of `part` alone, with the pools of `experts`, and the bytes of the checkpoint that were read. Not for a
        borrowed model."""
        raise NotImplementedError

    def outline(self, part: Stage) -> Model:
        """Return the graph of `part`, without values. Not for a borrowed model."""
        raise NotImplementedError

    def of_part(self, part: Stage, model: Model, weight_bytes: int) -> Self:
        """Return a copy that reads only `part`, whose graph is `model` and whose weights take `weight_bytes`."""
        own = copy(self)
        own.part, own.model, own.weight_bytes = part, model, weight_bytes
        own.expert_layers = () if part.share else layers_in(model, self.expert_layers)
        if part.first or part.share:
            own.vision = unseen("the first machine has its vision tower")
        return own


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
        self.index = meta.index
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
        self.expert_layers = expert_layers(model, meta.tensors)
        self.block_bytes = tuple(part_bytes[id(block)] for block in model.blocks)

    @property
    def size_changes(self) -> tuple[SizeChange, ...]:
        return size_changes(self._meta)

    def read_weights(self, progress: Progress | None, experts: PooledExperts | None = None) -> tuple[Model, list[str]]:
        weights = self._weights(progress) if experts is None else self._weights(progress, experts.reads)
        # The copies of a file have whole matrices only, and those of experts too.
        copies = None if self.part or experts else self._copies
        ready = partial(settle if experts is None else experts.settle, copies=copies, dtype=self.dtype)
        model = build(self.checkpoint.config, weights, ready, mtp=self._mtp, part=self.part)
        weights.finish()
        if copies:
            copies.keep()
        if experts is not None:
            experts.belong_to(model)
        return model, [*self._notes, *_reading_notes(weights)]

    def open_experts(self, nbytes: int, progress: Progress | None) -> PooledExperts | None:
        if not self.expert_layers:
            return None
        from .repack_cache.pooled_experts import open_experts  # few models need it

        weights, blocks = partial(self._weights, progress), len(self.block_bytes)
        return open_experts(
            self.checkpoint, self.expert_layers, blocks, nbytes, weights, self.part, dtype=self.dtype, quantize=self.quantize
        )

    def read_blocks(self, part: Stage, experts: PooledExperts | None = None) -> tuple[BlockStack, int]:
        weights = self._weights(None) if experts is None else self._weights(None, experts.reads)
        ready = partial(settle if experts is None else experts.settle, dtype=self.dtype)
        stack = build_blocks(self.checkpoint.config, weights, part, ready, self.dtype)
        weights.finish()
        if experts is not None:
            experts.belong_to(stack)
        return stack, weights.read_bytes

    def outline(self, part: Stage) -> Model:
        return build(self.checkpoint.config, self._meta, mtp=self._mtp, part=part)

    def _weights(self, progress: Progress | None, reads: Callable[[str], bool] = lambda name: True) -> CheckpointWeights:
        # Affine scales of a GGUF file are float16: bfloat16 would keep 8 of their 11 significant bits.
        halves = isinstance(self.checkpoint, GGUFCheckpoint) and self.checkpoint.packs and self.dtype != mx.float32
        scales = mx.float16 if halves else None
        index = self._meta.index
        return CheckpointWeights(
            self._whole, self.dtype, quantize=self.quantize, scales=scales, progress=progress, index=index, reads=reads
        )


def model_type(checkpoint: Checkpoint) -> str:
    """The architecture's name. Raises `UnsupportedModelError` where the config has none."""
    name = checkpoint.config.get("model_type")
    if not isinstance(name, str) or not name:
        raise UnsupportedModelError(f"{checkpoint.path}: config.json has no model_type that names the architecture")
    return name


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Load the tokenizer beside the weights, or in the GGUF file. Raises `TokenizerError`."""
    if isinstance(checkpoint, GGUFCheckpoint):
        return tokenizers.from_gguf(checkpoint.metadata)
    if not has_tokenizer(checkpoint.path):
        return NoTokenizer(checkpoint.path, checkpoint.config)
    return tokenizers.from_directory(checkpoint.path)


def generation_config(path: Path) -> dict[str, Any]:
    """The generation_config.json of a model directory; empty for a GGUF file."""
    return read_json_if_there(path / "generation_config.json") if path.is_dir() else {}


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


def _reading_notes(weights: CheckpointWeights) -> list[str]:
    rounded, skipped = Counter(weights.rounded.values()), Counter(weights.index.skipped.values())
    return [
        *(f"{count} tensors were rounded from {stored} to {dtype_name(weights.dtype)}" for stored, count in rounded.items()),
        *(f"{count} tensors are not used: {reason}" for reason, count in skipped.items()),
    ]
