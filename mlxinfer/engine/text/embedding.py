"""Turns texts into pooled sequences, and their vectors into embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import ContextLengthError, PromptError, SamplingError, UnsupportedModelError
from ...loading.recipes.embedding import NO_EMBEDDING_MODEL, EmbeddingRecipe
from ...models.decoder import Decoder
from ...util.dataclass import dataclass
from ..core.sequence import Sequence
from ..request_keywords import RequestOptions
from .hooks import active_hooks
from .input_processor import InputProcessor, Prompt, as_prompts, check_text_only
from .pooling import Pooling, StatePooling

if TYPE_CHECKING:
    from ..open_model import OpenModel

_TYPES: Mapping[str, tuple[str, ...]] = {
    "query": ("query", "search_query"),
    "document": ("document", "search_document", "passage", "corpus"),
}
"""Names of prompts in checkpoints, by kind of input. Cohere's clients send "search_query" and "search_document"."""


@dataclass(frozen=True, slots=True)
class Embedder:
    """An embedding model's recipe with its input processor. Any thread may use it."""

    inputs: InputProcessor
    recipe: EmbeddingRecipe

    @classmethod
    def of(cls, opened: OpenModel) -> Embedder:
        """Raise `UnsupportedModelError` for a model without embeddings."""
        recipe = opened.loaded.embedding
        if isinstance(recipe, str):
            plain = recipe.startswith(NO_EMBEDDING_MODEL)
            raise UnsupportedModelError(f"{opened.loaded.name} is {recipe}." if plain else recipe)
        if not isinstance(opened.loaded.model, Decoder):
            raise UnsupportedModelError(
                f"{opened.loaded.name} runs on mlx-lm's graph, which does not give the states that are to be pooled"
            )
        return cls(opened.inputs, recipe)

    @property
    def longest(self) -> int:
        """Maximum tokens of a text."""
        return min(self.recipe.max_tokens or self.inputs.max_context, self.inputs.max_context)

    def prompt(self, prompt_name: str | None, input_type: str | None) -> str:
        """The prompt before each text: that of `prompt_name`, or that for the kind of input, if there is one. Raises `SamplingError`."""
        prompts = self.recipe.prompts
        if prompt_name is not None and input_type is not None:
            raise SamplingError("prompt_name and input_type say the same: give one of them")
        if input_type is not None:
            names = next((names for names in _TYPES.values() if input_type in names), None)
            if names is None:
                raise SamplingError(f"input_type must be {' or '.join(_TYPES)}, not {input_type!r}")
            return next((prompts[name] for name in names if name in prompts), "")
        if prompt_name is None:
            return prompts.get(self.recipe.default_prompt or "", "")
        if prompt_name not in prompts:
            raise SamplingError(f"prompt_name: unknown prompt {prompt_name!r} (known: {', '.join(prompts) or 'none'})")
        return prompts[prompt_name]

    def token_ids(self, texts: Prompt | Many[Prompt], prompt: str, *, truncate: bool = False) -> list[list[int]]:
        """Token ids of each text, with `prompt` before it; given token ids stay as they are. Raises `PromptError`, and `ContextLengthError`
        unless `truncate` cuts long texts."""
        return [self._ids(text, prompt, truncate) for text in as_prompts(texts)]

    def _ids(self, text: Any, prompt: str, truncate: bool) -> list[int]:
        if isinstance(text, str):
            ids = self.inputs.tokenizer.encode(prompt + text)
            closing = self._num_closing_tokens(ids) if len(ids) > self.longest else 0
        else:
            ids, closing = list(text), 0
        if len(ids) > self.longest:
            if not truncate:
                message = f"a text has {len(ids)} tokens, and this model takes {self.longest}: shorten it, or ask for truncate"
                raise ContextLengthError(message, len(ids), self.longest)
            ids = ids[: self.longest - closing] + ids[len(ids) - closing :]
        return self.inputs.check(ids)

    def _num_closing_tokens(self, ids: Many[int]) -> int:
        """Tokens that the tokenizer appends to every text."""
        empty = self.inputs.tokenizer.encode("")
        count = 0
        while count < len(empty) and ids[-1 - count] == empty[-1 - count]:
            count += 1
        return count

    def sequences(self, ids: Iterable[list[int]], options: RequestOptions) -> list[Sequence]:
        """One sequence for each text."""
        pooling = StatePooling(self.recipe.pooling)
        return [pooled(self.inputs, each, pooling, options) for each in ids]

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raise `SamplingError` unless `dimensions` is positive or None. `EmbeddingRecipe.finish` checks the maximum."""
        if dimensions is not None and (isinstance(dimensions, bool) or not isinstance(dimensions, int) or dimensions < 1):
            raise SamplingError(f"dimensions must be a whole number above 0, not {dimensions!r}")

    def finish(self, vectors: Many[np.ndarray], dimensions: int | None) -> np.ndarray:
        """Embeddings from pooled vectors, float32 `[n, d]`."""
        return self.recipe.finish(np.stack(vectors), dimensions)


def pooled(inputs: InputProcessor, ids: list[int], pooling: Pooling, options: RequestOptions, snapshot: int = 0) -> Sequence:
    """A sequence to pool. Its first `snapshot` tokens are cached for others. Raises `SamplingError` for an unknown adapter, and
    `UnsupportedModelError` for interventions in a bidirectional model."""
    hooks = active_hooks(inputs.model)
    if hooks is not None and not inputs.is_causal:
        raise UnsupportedModelError("interventions are not supported in a model that reads texts from both ends")
    return Sequence(
        ids,
        inputs.default_params,
        seed=0,
        max_length=len(ids),
        cache_salt=options.cache_salt,
        client_id=options.client_id,
        priority=options.priority,
        deadline=options.deadline,
        snapshot_points=(snapshot,) if snapshot else (),
        hooks=hooks,
        adapter=inputs.adapter(options.adapter),
        pooling=pooling,
    )


def check_texts(texts: Prompt | Many[Prompt]) -> None:
    """Raise `PromptError` if there is no text, or an image."""
    prompts = as_prompts(texts)
    if not prompts:
        raise PromptError("no text: give one, or a list of texts")
    check_text_only(prompts)
