"""The stages of a model before it runs: prepared, with headers only, then loaded, with weights."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ...errors import UnsupportedModelError
from ...models import Model
from ...models.pipeline_stage import Stage
from ...nn.packing import arrays
from ...nn.weights import Format
from ...tokenizer import tokenizer as tokenizers
from ...tokenizer.config_files import has_tokenizer
from ...tokenizer.no_tokenizer import NoTokenizer
from ...tokenizer.tokenizer import Tokenizer
from ...util.dataclass import dataclass
from ..checkpoint import Checkpoint
from ..files import read_json_if_there
from ..gguf import GGUFCheckpoint
from ..recipes.embedding import EmbeddingRecipe, read_recipe
from ..recipes.rerank import RerankRecipe, read_reranking
from ..summary import Summary, summarize
from ..weights import Progress

if TYPE_CHECKING:
    from typing_extensions import Self

    from ...models.decoder import BlockStack
    from ..memory.weight_sizes import SizeChange


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
    size_changes: tuple[SizeChange, ...] = ()
    """Reasons for weights that take other bytes in memory than in the files."""
    part: Stage | None = None
    """Blocks of this process, if others have the rest."""

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

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer, which `read` needs. Raises `TokenizerError`."""
        return load_tokenizer(self.checkpoint)

    def read(self, tokenizer: Tokenizer, progress: Progress | None = None) -> LoadedModel:
        """Read the weights. Raises `WeightsError` for values that are NaN or infinite."""
        checkpoint = self.checkpoint
        if isinstance(checkpoint, GGUFCheckpoint):
            checkpoint.forget_vocabulary()
        model, notes = self.read_weights(progress)
        mx.clear_cache()
        if isinstance(tokenizer, NoTokenizer):
            notes = [*notes, "there is no tokenizer: prompts and answers are token ids"]
        return LoadedModel(
            model=model,
            tokenizer=tokenizer,
            config=checkpoint.config,
            generation_config=generation_config(checkpoint.path),
            dtype=self.dtype,
            weight_bytes=sum(array.nbytes for array in arrays(model)),
            notes=(*model.notes, *notes),
            embedding=read_recipe(checkpoint),
            reranking=read_reranking(checkpoint, self.name, tokenizer),
            summary=summarize(checkpoint, self.name, self.model_type, model.max_context, self.quantize),
        )

    def read_weights(self, progress: Progress | None) -> tuple[Model, list[str]]:
        """Return the graph of `part`, with weights, and messages for the user."""
        raise NotImplementedError

    def read_blocks(self, part: Stage) -> tuple[BlockStack, int]:
        """Return the blocks of `part` alone, and the bytes of the checkpoint that were read. Not for a borrowed model."""
        raise NotImplementedError

    def outline(self, part: Stage) -> Model:
        """Return the graph of `part`, without values. Not for a borrowed model."""
        raise NotImplementedError

    def of_part(self, part: Stage, model: Model, weight_bytes: int) -> Self:
        """Return a copy that reads only `part`, whose graph is `model` and whose weights take `weight_bytes`."""
        own = copy(self)
        own.part, own.model, own.weight_bytes = part, model, weight_bytes
        return own


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
