"""`POST /v1/embeddings`: vectors of texts."""

from __future__ import annotations

import base64
from typing import Annotated, Literal, Union

import numpy as np
from pydantic import Field
from starlette.responses import JSONResponse
from starlette.types import ASGIApp
from typing_extensions import TypedDict

from ..routing import Doc, Endpoint, RequestContext, Server
from ..shared.pooling import embed
from ..validation import PromptOrPrompts, StrictModel

Name = Annotated[str, Field(max_length=256)]


class EmbeddingRequest(StrictModel):
    """`input_type` ("query" or "document") and `prompt_name` select one of the checkpoint's prompts. OpenAI does not have these two
    fields."""

    model: Name
    input: PromptOrPrompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: Name | None = None
    input_type: Name | None = None
    prompt_name: Name | None = None


class EmbeddingObject(TypedDict):
    """The vector is a list of numbers, or the base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: Union[list[float], str]


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class Embeddings(TypedDict):
    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage


async def create(context: RequestContext, body: EmbeddingRequest) -> ASGIApp:
    served = await context.model(body.model)
    found = await embed(
        context,
        served,
        body.input,
        field="input",
        dimensions=body.dimensions,
        prompt_name=body.prompt_name,
        input_type=body.input_type,
        client_id=body.user or "",
    )
    packed = body.encoding_format == "base64"
    data = [
        EmbeddingObject(object="embedding", index=index, embedding=_base64(row) if packed else row.tolist())
        for index, row in enumerate(found.rows)
    ]
    usage = EmbeddingUsage(prompt_tokens=found.tokens, total_tokens=found.tokens)
    return JSONResponse(Embeddings(object="list", data=data, model=served.name, usage=usage))


def _base64(row: np.ndarray) -> str:
    return base64.b64encode(row.astype("<f4").tobytes()).decode()


def routes(server: Server) -> list[Endpoint]:
    return [Endpoint("POST", "/v1/embeddings", create, EmbeddingRequest, Doc("Vectors of texts", Embeddings), server=server)]
