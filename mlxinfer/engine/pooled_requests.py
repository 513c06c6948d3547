"""`embed` and `rerank` of both front doors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sized
from collections.abc import Sequence as Many
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ..errors import DeadlineError
from .embedding import Embedder, check_texts
from .input_processor import Prompt, RequestKeywords, RequestOptions, as_prompts
from .open_model import OpenModel
from .output_processor import FEED
from .reranking import Pair, Ranked, check_pairs, ranked, score_pairs, scorer
from .sequence import Sequence

if TYPE_CHECKING:
    from typing_extensions import Unpack

Result = TypeVar("Result")

_SHORT = 2000
"""Characters or token ids that are prepared in the event loop: going through another thread would take longer."""


class PooledRequests:
    """For `LLM`."""

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
        pairs = [(query, document) for document in documents]
        return ranked(self.relevance(pairs, instruction=instruction, **options), documents, top_n)

    def relevance(self, pairs: Many[Pair], *, instruction: str | None = None, **options: Unpack[RequestKeywords]) -> np.ndarray:
        """How relevant the second text of each pair is to the first, `[n]`: see `rerank`."""
        check_pairs(pairs)
        terms, how = RequestOptions.of("relevance", options), scorer(self._open_model())
        waves = how.waves(how.token_ids(pairs, instruction), terms)
        return score_pairs(how, pairs, self._pool(waves, terms))


class AsyncPooledRequests:
    """For `AsyncLLM`."""

    async def _opened(self) -> OpenModel:
        raise NotImplementedError

    async def _vector(self, sequence: Sequence) -> np.ndarray | None:
        """None if it ran out of time."""
        raise NotImplementedError

    async def embedding_ids(
        self,
        texts: Prompt | Many[Prompt],
        *,
        prompt_name: str | None = None,
        input_type: str | None = None,
        truncate: bool = False,
    ) -> list[list[int]]:
        """The token ids that `embed` computes, for whoever wants to count them first; `embed` takes them as they are."""
        check_texts(texts)
        embedder = Embedder.of(await self._opened())
        make = partial(embedder.token_ids, texts, embedder.prompt(prompt_name, input_type), truncate=truncate)
        return await _made(_size(texts), make)

    async def embed(
        self,
        texts: Prompt | Many[Prompt],
        dimensions: int | None = None,
        *,
        prompt_name: str | None = None,
        input_type: str | None = None,
        truncate: bool = False,
        **options: Unpack[RequestKeywords],
    ) -> np.ndarray:
        """Vectors of texts, numpy float32 `[n, d]`, as `LLM.embed`."""
        terms, embedder = RequestOptions.of("embed", options), Embedder.of(await self._opened())
        embedder.check_dimensions(dimensions)
        ids = await self.embedding_ids(texts, prompt_name=prompt_name, input_type=input_type, truncate=truncate)
        vectors = await self._pool([embedder.sequences(ids, terms)], terms)
        return await _made(_SHORT * bool(embedder.recipe.dense) + len(ids), partial(embedder.finish, vectors, dimensions))

    async def rerank(
        self,
        query: str,
        documents: Many[str],
        top_n: int | None = None,
        *,
        instruction: str | None = None,
        **options: Unpack[RequestKeywords],
    ) -> list[Ranked]:
        """The most relevant documents, as `LLM.rerank`."""
        pairs = [(query, document) for document in documents]
        scores, _ = await self.relevance(pairs, instruction=instruction, **options)
        return ranked(scores, documents, top_n)

    async def relevance(
        self, pairs: Many[Pair], *, instruction: str | None = None, **options: Unpack[RequestKeywords]
    ) -> tuple[np.ndarray, int]:
        """`[n]` as `LLM.relevance`, and how many tokens the pairs had."""
        check_pairs(pairs)
        terms, how = RequestOptions.of("relevance", options), scorer(await self._opened())
        ids = await _made(sum(len(a) + len(b) for a, b in pairs), partial(how.token_ids, pairs, instruction))
        vectors = await self._pool(how.waves(ids, terms), terms)
        return score_pairs(how, pairs, vectors), sum(map(len, ids))

    async def _pool(self, waves: list[list[Sequence]], terms: RequestOptions) -> list[np.ndarray]:
        free = asyncio.Semaphore(FEED * (await self._opened()).config.max_num_seqs)

        async def one(sequence: Sequence) -> np.ndarray:
            async with free:
                vector = await self._vector(sequence)
            if vector is None:
                raise out_of_time(terms)
            return vector

        vectors: list[np.ndarray] = []
        for wave in waves:
            tasks = [asyncio.ensure_future(one(sequence)) for sequence in wave]
            try:
                vectors += await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
        return vectors


def _size(texts: Prompt | Many[Prompt]) -> int:
    """Characters, or token ids, of all texts together."""
    return sum(len(each) for each in as_prompts(texts) if isinstance(each, Sized))


def out_of_time(terms: RequestOptions) -> DeadlineError:
    """For texts that were not read in time."""
    return DeadlineError(f"the texts were not read within {terms.timeout_s:g} s")


async def _made(size: int, make: Callable[[], Result]) -> Result:
    """What a function returns, called in another thread where it may take long."""
    return make() if size <= _SHORT else await asyncio.to_thread(make)
