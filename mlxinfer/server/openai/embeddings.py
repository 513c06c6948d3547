"""`POST /v1/embeddings`: refused for every model that is served now. The mean of a causal model's states is no embedding."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.types import ASGIApp
from typing_extensions import TypedDict

from ..fields import Body, PromptOrPrompts
from ..problems import Problem
from ..routing import Call, Doc, Endpoint, Server


class EmbeddingRequest(Body):
    model: Annotated[str, Field(max_length=256)]
    input: PromptOrPrompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: Annotated[str, Field(max_length=256)] | None = None


class Embeddings(TypedDict):
    object: Literal["list"]
    data: list[Any]
    model: str


async def create(call: Call, body: EmbeddingRequest) -> ASGIApp:
    served = call.server.models.get(body.model)
    raise Problem(400, "unsupported", f"{served.name} writes text and is no embedding model.", param="model", code="unsupported_model")


def routes(server: Server) -> list[Endpoint]:
    return [Endpoint("POST", "/v1/embeddings", create, EmbeddingRequest, Doc("Vectors for texts", Embeddings), server=server)]
