"""`embed` and `rerank` of `LLM`."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

import numpy as np

from ...errors import DeadlineError
from ..core.sequence import Sequence
from ..open_model import OpenModel
from ..request_keywords import RequestKeywords, RequestOptions
from .input_processor import Prompt

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .reranking import Pair, Ranked


class PooledRequests:
    """For `LLM`, whose start does not wait for what only these need."""

    def _open_model(self) -> OpenModel:
        raise NotImplementedError

    def _pool(self, waves: list[list[Sequence]], terms: RequestOptions) -> list[np.ndarray]:
        raise NotImplementedError

    def embed(
        self,
        texts: Prompt | Many[Prompt],
        dimensions: int | None = None,
        *,
        prompt_name: str | None = None,
        input_type: str | None = None,
        truncate: bool = False,
        **options: Unpack[RequestKeywords],
    ) -> np.ndarray:
        """Vectors of texts (or of token ids, taken as they are), numpy float32 `[n, d]`, as the checkpoint's own recipe makes them.

        `dimensions` keeps the first numbers of each vector, for models that were trained for it (Matryoshka). `prompt_name` puts one of
        the checkpoint's prompts before each text, `input_type` ("query" or "document") the one for that kind, if there is one. `truncate`
        cuts texts that are too long. Raises `UnsupportedModelError` for a model that does not say how it embeds, `PromptError`,
        `SamplingError`, and `DeadlineError` after `timeout_s`.
        """
        from .embedding import Embedder, check_texts

        check_texts(texts)
        terms, embedder = RequestOptions.of("embed", options), Embedder.of(self._open_model())
        embedder.check_dimensions(dimensions)
        ids = embedder.token_ids(texts, embedder.prompt(prompt_name, input_type), truncate=truncate)
        return embedder.finish(self._pool([embedder.sequences(ids, terms)], terms), dimensions)

    def rerank(
        self,
        query: str,
        documents: Many[str],
        top_n: int | None = None,
        *,
        instruction: str | None = None,
        **options: Unpack[RequestKeywords],
    ) -> list[Ranked]:
        """The `top_n` most relevant documents (all by default), best first. `instruction` tells a reranker what makes a document relevant.
        An embedding model ranks by cosine. Raises as `embed` does."""
        from .reranking import ranked

        pairs = [(query, document) for document in documents]
        return ranked(self.relevance(pairs, instruction=instruction, **options), documents, top_n)

    def relevance(self, pairs: Many[Pair], *, instruction: str | None = None, **options: Unpack[RequestKeywords]) -> np.ndarray:
        """How relevant the second text of each pair is to the first, `[n]`: see `rerank`."""
        from .reranking import check_pairs, score_pairs, scorer

        check_pairs(pairs)
        terms, how = RequestOptions.of("relevance", options), scorer(self._open_model())
        waves = how.waves(how.token_ids(pairs, instruction), terms)
        return score_pairs(how, pairs, self._pool(waves, terms))


def out_of_time(terms: RequestOptions) -> DeadlineError:
    """For texts that were not read in time."""
    return DeadlineError(f"the texts were not read within {terms.timeout_s:g} s")
