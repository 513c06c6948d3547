"""Relevance of documents to a query, by a model that answers yes or no or by the vectors of an embedding model."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Union

import numpy as np

from ...errors import ContextLengthError, PromptError, UnsupportedModelError
from ...loading.recipes.rerank import RerankRecipe
from ...util.dataclass import dataclass
from ..core.sequence import Sequence
from ..request_keywords import RequestOptions
from .embedding import Embedder, pooled
from .input_processor import InputProcessor
from .pooling import TokenLogits

if TYPE_CHECKING:
    from ..open_model import OpenModel

_WORTH_KEEPING = 64
"""Least common prefix in tokens for which the first pair is computed alone, so that the others find its prefix in the cache."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document with its relevance."""

    index: int
    """Its index in the given documents."""
    relevance_score: float
    """0 to 1 from a reranker; a cosine, -1 to 1, from an embedding model."""
    document: str
    """Its text."""


def ranked(scores: np.ndarray, documents: Many[str], top_n: int | None = None) -> list[Ranked]:
    """The `top_n` most relevant documents (all by default), best first; equals stay in order."""
    order = sorted(range(len(documents)), key=lambda i: -scores[i])
    return [Ranked(i, float(scores[i]), documents[i]) for i in order[:top_n]]


Pair = tuple[str, str]
"""A query and a document."""


@dataclass(frozen=True, slots=True)
class YesNoScorer:
    """A causal model that answers yes if the document answers the query."""

    inputs: InputProcessor
    recipe: RerankRecipe
    """The question, and the tokens of its answers."""
    shares: bool
    """True if there is a prefix cache."""

    def token_ids(self, pairs: Many[Pair], instruction: str | None) -> list[list[int]]:
        """Token ids of each pair. Raises `ContextLengthError`, and `PromptError` for a text that is not Unicode."""
        encode, recipe = self.inputs.tokenizer.encode, self.recipe
        before = encode(recipe.before, add_special_tokens=False)
        after = encode(recipe.after, add_special_tokens=False)
        found = []
        for query, document in pairs:
            ids = [*before, *encode(recipe.pair(instruction, query, document), add_special_tokens=False), *after]
            if len(ids) > self.inputs.max_context:
                message = (
                    f"a query and its document have {len(ids)} tokens, and the context is {self.inputs.max_context}: shorten the document"
                )
                raise ContextLengthError(message, len(ids), self.inputs.max_context)
            found.append(ids)
        return found

    def waves(self, ids: Many[list[int]], options: RequestOptions) -> list[list[Sequence]]:
        """Sequences in groups that run one after another. If all share a long prefix, the first is a group of its own."""
        recipe = self.recipe
        pooling = TokenLogits((recipe.yes,) if recipe.no is None else (recipe.yes, recipe.no))
        common = _common_prefix(ids) if self.shares and len(ids) > 1 else 0
        first = common if common >= _WORTH_KEEPING else 0
        sequences = [pooled(self.inputs, each, pooling, options, 0 if number else first) for number, each in enumerate(ids)]
        return [sequences[:1], sequences[1:]] if first else [sequences]

    def scores(self, vectors: Many[np.ndarray]) -> np.ndarray:
        """The probability of yes, float64 `[n]`."""
        logits = np.stack(vectors).astype(np.float64)
        distance = logits[:, 0] if self.recipe.no is None else logits[:, 0] - logits[:, 1]
        return np.asarray(1 / (1 + np.exp(-distance)))


@dataclass(frozen=True, slots=True)
class CosineScorer:
    """An embedding model, with one vector for each query and each document."""

    embedder: Embedder

    def token_ids(self, pairs: Many[Pair], instruction: str | None) -> list[list[int]]:
        """Token ids of the distinct queries, then of the distinct documents."""
        if instruction is not None:
            raise UnsupportedModelError("an instruction is for rerankers: the prompts of this embedding model are fixed")
        embedder = self.embedder
        queries, documents = (list(dict.fromkeys(texts)) for texts in zip(*pairs, strict=True))
        return [
            *embedder.token_ids(queries, embedder.prompt(None, "query")),
            *embedder.token_ids(documents, embedder.prompt(None, "document")),
        ]

    def waves(self, ids: Many[list[int]], options: RequestOptions) -> list[list[Sequence]]:
        """All sequences in one group."""
        return [self.embedder.sequences(ids, options)]

    def cosines(self, pairs: Many[Pair], vectors: Many[np.ndarray]) -> np.ndarray:
        """Cosine of each pair, float32 `[n]`."""
        queries, documents = ({text: i for i, text in enumerate(dict.fromkeys(texts))} for texts in zip(*pairs, strict=True))
        rows = self.embedder.finish(vectors, None)
        rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
        return np.array([rows[queries[q]] @ rows[len(queries) + documents[d]] for q, d in pairs], np.float32)


Scorer = Union[YesNoScorer, CosineScorer]


def scorer(opened: OpenModel) -> Scorer:
    """The scorer of a model. Raises `UnsupportedModelError` if it cannot score pairs."""
    recipe = opened.loaded.reranking
    if recipe is not None:
        return YesNoScorer(opened.inputs, recipe, opened.config.prefix_cache)
    try:
        return CosineScorer(Embedder.of(opened))
    except UnsupportedModelError:
        raise UnsupportedModelError(
            f"{opened.loaded.name} is neither a reranker that is known here (Qwen3-Reranker, told by its name or by modules.json) nor an "
            "embedding model: use one of these"
        ) from None


def score_pairs(how: Scorer, pairs: Many[Pair], vectors: Many[np.ndarray]) -> np.ndarray:
    """Relevance of each pair, `[n]`, from the vectors of its sequences."""
    return how.scores(vectors) if isinstance(how, YesNoScorer) else how.cosines(pairs, vectors)


def check_pairs(pairs: Many[Pair]) -> None:
    """Raise `PromptError` for no pairs, and for values that are not text."""
    if not pairs:
        raise PromptError("there are no documents: give at least one")
    if not all(isinstance(text, str) for pair in pairs for text in pair):
        raise PromptError("queries and documents must be texts")


def _common_prefix(ids: Many[list[int]]) -> int:
    """Length of the common prefix."""
    low, high = min(ids), max(ids)
    return next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
