"""`POST /api/embed`, and its older form `POST /api/embeddings`: vectors of texts."""

from __future__ import annotations

import time
from typing import Annotated

from pydantic import Field
from starlette.responses import JSONResponse
from starlette.types import ASGIApp
from typing_extensions import TypedDict

from ..routing import Doc, Endpoint, RequestContext, Server
from ..shared.pooling import embed
from ..validation import StrictModel, TextOrTexts
from .models import find_entry
from .protocol import KeepAlive, OllamaOptions, seconds


class EmbedRequest(StrictModel):
    """The body of `POST /api/embed`. Texts that are too long are cut unless `truncate` is false."""

    model: Annotated[str, Field(max_length=256)]
    input: TextOrTexts | None = None
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=0)] | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None


class OldEmbeddingRequest(StrictModel):
    """The body of `POST /api/embeddings`."""

    model: Annotated[str, Field(max_length=256)]
    prompt: str | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None


class EmbedReply(TypedDict):
    """Durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OldEmbeddingReply(TypedDict):
    embedding: list[float]


async def create(context: RequestContext, body: EmbedRequest) -> ASGIApp:
    began = time.monotonic_ns()
    served = await context.use(find_entry(context.server.models, body.model), seconds(body.keep_alive))
    reply = EmbedReply(model=body.model, embeddings=[], total_duration=0, load_duration=0, prompt_eval_count=0)
    if body.input:
        found = await embed(
            context, served, body.input, field="input", dimensions=body.dimensions or None, truncate=body.truncate is not False
        )
        reply["embeddings"], reply["prompt_eval_count"] = found.rows.tolist(), found.tokens
    reply["total_duration"] = time.monotonic_ns() - began
    return JSONResponse(reply)


async def create_old(context: RequestContext, body: OldEmbeddingRequest) -> ASGIApp:
    served = await context.use(find_entry(context.server.models, body.model), seconds(body.keep_alive))
    if not body.prompt:
        return JSONResponse(OldEmbeddingReply(embedding=[]))
    found = await embed(context, served, body.prompt, field="prompt", truncate=True)
    return JSONResponse(OldEmbeddingReply(embedding=found.rows[0].tolist()))


def routes(server: Server) -> list[Endpoint]:
    vectors, vector = Doc("Vectors of texts", EmbedReply), Doc("The vector of a text", OldEmbeddingReply)
    return [
        Endpoint("POST", "/api/embed", create, EmbedRequest, vectors, server=server, any_type=True),
        Endpoint("POST", "/api/embeddings", create_old, OldEmbeddingRequest, vector, server=server, any_type=True),
    ]
