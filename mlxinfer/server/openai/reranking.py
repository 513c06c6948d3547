"""`POST /v1/rerank` and `/rerank` (the shape of Jina and Cohere), and `POST /v1/score` (vLLM's): relevance of texts to each other."""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal, Union

from pydantic import Discriminator, Field, Tag
from starlette.responses import JSONResponse
from starlette.types import ASGIApp
from typing_extensions import NotRequired, TypedDict

from ...engine.text.reranking import ranked
from ..errors import invalid
from ..routing import Doc, Endpoint, RequestContext, Server
from ..shared.pooling import check_count, relevance
from ..validation import FIRST_ERROR_ONLY, StrictModel, TextOrTexts
from .embeddings import EmbeddingUsage, Name


class TextDocument(StrictModel):
    """A document as an object, a form that Cohere's and Jina's clients may send."""

    text: str


def _document_tag(value: Any) -> str:
    return "<text>" if isinstance(value, str) else "<object>"


Document = Annotated[Union[Annotated[str, Tag("<text>")], Annotated[TextDocument, Tag("<object>")]], Discriminator(_document_tag)]


class RerankRequest(StrictModel):
    """`instruction` describes the criterion of relevance to the reranker. Jina does not have this field."""

    model: Name
    query: str
    documents: Annotated[list[Document], FIRST_ERROR_ONLY]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None
    instruction: str | None = None
    user: Name | None = None


class ScoreRequest(StrictModel):
    """One text and several, or two lists of the same length that are scored in pairs."""

    model: Name
    text_1: TextOrTexts
    text_2: TextOrTexts
    instruction: str | None = None
    user: Name | None = None


class RankedDocument(TypedDict):
    text: str


class RankedResult(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[RankedDocument]


class RerankReply(TypedDict):
    """The most relevant document is first; `index` is its index in the request."""

    id: str
    model: str
    results: list[RankedResult]
    usage: EmbeddingUsage


class ScoreObject(TypedDict):
    index: int
    object: Literal["score"]
    score: float


class ScoreList(TypedDict):
    id: str
    object: Literal["list"]
    model: str
    data: list[ScoreObject]
    usage: EmbeddingUsage


async def rerank(context: RequestContext, body: RerankRequest) -> ASGIApp:
    served = await context.model(body.model)
    documents = [each if isinstance(each, str) else each.text for each in body.documents]
    check_count(documents, "documents")
    pairs = [(body.query, document) for document in documents]
    scores, tokens = await relevance(context, served, pairs, instruction=body.instruction, client_id=body.user or "")
    results: list[RankedResult] = []
    for each in ranked(scores, documents, body.top_n):
        result = RankedResult(index=each.index, relevance_score=each.relevance_score)
        if body.return_documents:
            result["document"] = RankedDocument(text=each.document)
        results.append(result)
    return JSONResponse(RerankReply(id=f"rerank-{uuid.uuid4().hex}", model=served.name, results=results, usage=_rerank_usage(tokens)))


async def score(context: RequestContext, body: ScoreRequest) -> ASGIApp:
    served = await context.model(body.model)
    pairs = _pairs(body)
    scores, tokens = await relevance(context, served, pairs, instruction=body.instruction, client_id=body.user or "")
    data = [ScoreObject(index=index, object="score", score=float(each)) for index, each in enumerate(scores)]
    answer = ScoreList(id=f"score-{uuid.uuid4().hex}", object="list", model=served.name, data=data, usage=_rerank_usage(tokens))
    return JSONResponse(answer)


def _pairs(body: ScoreRequest) -> list[tuple[str, str]]:
    first, second = ([texts] if isinstance(texts, str) else list(texts) for texts in (body.text_1, body.text_2))
    check_count(first, "text_1")
    check_count(second, "text_2")
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        message = f"text_1 has {len(first)} texts and text_2 {len(second)}: give one first text, or as many of both"
        raise invalid(message, "text_2", "invalid_value")
    return list(zip(first, second, strict=True))


def _rerank_usage(tokens: int) -> EmbeddingUsage:
    return EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)


def routes(server: Server) -> list[Endpoint]:
    doc = Doc("Documents by their relevance to a query", RerankReply)
    return [
        Endpoint("POST", "/v1/rerank", rerank, RerankRequest, doc, server=server),
        Endpoint("POST", "/rerank", rerank, RerankRequest, doc, server=server),
        Endpoint("POST", "/v1/score", score, ScoreRequest, Doc("Relevance of one text to another", ScoreList), server=server),
    ]
