"""`embed` and `rerank` of `AsyncLLM`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ..core.sequence import Sequence
from ..open_model import OpenModel
from ..request_keywords import RequestKeywords, RequestOptions
from .embedding import Embedder, check_texts
from .input_processor import AnyPrompt, Prompt, as_prompts
from .output_processor import FEED
from .pooled_requests import out_of_time
from .reranking import Pair, Ranked, check_pairs, ranked, score_pairs, scorer

if TYPE_CHECKING:
    from typing_extensions import Unpack

Result = TypeVar("Result")

SHORT = 2000
"""Characters or token ids that are prepared in the event loop: going through another thread would take longer."""


class AsyncPooledRequests:
    """For `AsyncLLM`; a part of `LLM`'s start would be spent on asyncio if both were in one file."""

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
        return await prepared(sum(map(size, as_prompts(texts))), make)

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
        return await prepared(SHORT * bool(embedder.recipe.dense) + len(ids), partial(embedder.finish, vectors, dimensions))

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
        return ranked(await self.relevance(pairs, instruction=instruction, **options), documents, top_n)

    async def relevance(self, pairs: Many[Pair], *, instruction: str | None = None, **options: Unpack[RequestKeywords]) -> np.ndarray:
        """`[n]`, as `LLM.relevance`."""
        return (await self.counted_relevance(pairs, instruction=instruction, **options))[0]

    async def counted_relevance(
        self, pairs: Many[Pair], *, instruction: str | None = None, **options: Unpack[RequestKeywords]
    ) -> tuple[np.ndarray, int]:
        """`relevance`, and how many tokens the pairs had."""
        check_pairs(pairs)
        terms, how = RequestOptions.of("relevance", options), scorer(await self._opened())
        ids = await prepared(sum(len(a) + len(b) for a, b in pairs), partial(how.token_ids, pairs, instruction))
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


def size(prompt: AnyPrompt) -> int:
    """Characters, or token ids."""
    return len(prompt) if hasattr(prompt, "__len__") else 0


async def prepared(size: int, prepare: Callable[[], Result]) -> Result:
    """Prepare what is short here, and what is long in another thread, so that the event loop goes on."""
    return prepare() if size <= SHORT else await asyncio.to_thread(prepare)
