"""Runs embedding and reranking requests of all dialects: counts and logs them, and cancels them when the client disconnects."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from ...errors import MLXInferError, PromptError
from ...types import Completion, Usage
from .. import sse
from ..errors import from_engine_error, invalid
from ..model_manager.registry import ServedModel
from ..routing import RequestContext
from ..serving import begin, options

if TYPE_CHECKING:
    from ...engine.request_keywords import RequestKeywords

MAX_INPUTS = 2048
"""Maximum texts of one request, as in OpenAI's API."""
Input = Union[str, list[str], list[int], list[list[int]]]

_OTHER_VOCABULARY = (
    "token ids must be this model's own, and clients that count with tiktoken send OpenAI's: "
    "send texts (langchain: OpenAIEmbeddings(check_embedding_ctx_length=False))"
)


@dataclass(frozen=True, slots=True)
class Vectors:
    """Result of an embedding request."""

    rows: np.ndarray
    """float32 `[n, d]`."""
    tokens: int


async def embed(
    context: RequestContext,
    served: ServedModel,
    texts: Input,
    *,
    field: str,
    dimensions: int | None = None,
    prompt_name: str | None = None,
    input_type: str | None = None,
    truncate: bool = False,
    client_id: str = "",
) -> Vectors:
    """Vectors of texts, or of token ids. `field` is the name of the request's field. Raises `APIError`."""
    is_ids = isinstance(texts, list) and bool(texts) and not isinstance(texts[0], str)
    check_count(texts if isinstance(texts, list) and not (texts and isinstance(texts[0], int)) else [texts], field)

    async def work(terms: RequestKeywords) -> tuple[np.ndarray, int]:
        try:
            ids = await served.llm.embedding_ids(texts, prompt_name=prompt_name, input_type=input_type, truncate=truncate)
        except PromptError as error:
            if is_ids and "token id" in str(error):
                raise invalid(f"{field}: {error}; {_OTHER_VOCABULARY}", field, "invalid_value") from None
            raise
        rows = await served.llm.embed(ids, dimensions, **terms)
        return rows, sum(map(len, ids))

    return Vectors(*await _run_counted(context, served, client_id, work))


async def relevance(
    context: RequestContext, served: ServedModel, pairs: Sequence[tuple[str, str]], *, instruction: str | None = None, client_id: str = ""
) -> tuple[np.ndarray, int]:
    """Relevance of the second text of each pair to the first, float32 `[n]`, and the number of tokens. Raises `APIError`."""

    async def work(terms: RequestKeywords) -> tuple[np.ndarray, int]:
        return await served.llm.counted_relevance(pairs, instruction=instruction, **terms)

    return await _run_counted(context, served, client_id, work)


def check_count(texts: Sequence[object], field: str) -> None:
    """Raise `APIError` for no texts or too many."""
    if not texts:
        raise invalid(f"{field}: at least one text", field, "invalid_value")
    if len(texts) > MAX_INPUTS:
        raise invalid(f"{field}: at most {MAX_INPUTS} texts in one request", field, "invalid_value")


async def _run_counted(
    context: RequestContext,
    served: ServedModel,
    client_id: str,
    work: Callable[[RequestKeywords], Coroutine[Any, Any, tuple[np.ndarray, int]]],
) -> tuple[np.ndarray, int]:
    metrics, finished = begin(context, served), False
    try:
        rows, tokens = await sse.unless_gone(context.receive, work(options(context, served, client_id)))
        finished = True
        context.log["prompt_tokens"] = tokens
        metrics.completion(Completion("", [], "stop", Usage(tokens, 0)))
        return rows, tokens
    except MLXInferError as error:
        raise from_engine_error(error) from error
    finally:
        metrics.end(finished)
