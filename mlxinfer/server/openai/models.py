"""`GET /v1/models`, and `POST /v1/embeddings`, which is refused."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.responses import JSONResponse
from starlette.types import ASGIApp
from typing_extensions import NotRequired, TypedDict

from ..errors import APIError
from ..models import ServedModel
from ..routing import Doc, Endpoint, RequestContext, Server
from ..validation import PromptOrPrompts, StrictModel


class Model(TypedDict):
    """`max_model_len`, in tokens of prompt and answer together, is vLLM's field, and so is `parent`, the model of an adapter; those from
    `type` on are Anthropic's, whose clients ask at the same path."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    parent: NotRequired[str]
    type: Literal["model"]
    display_name: str
    created_at: str


class Models(TypedDict):
    """All models are on one page, as the fields from `has_more` on tell Anthropic's clients."""

    object: Literal["list"]
    data: list[Model]
    has_more: Literal[False]
    first_id: str
    last_id: str


class EmbeddingRequest(StrictModel):
    model: Annotated[str, Field(max_length=256)]
    input: PromptOrPrompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: Annotated[str, Field(max_length=256)] | None = None


class Embeddings(TypedDict):
    object: Literal["list"]
    data: list[Any]
    model: str


def _model(served: ServedModel) -> Model:
    model = Model(
        id=served.name,
        object="model",
        created=served.created,
        owned_by="mlxinfer",
        max_model_len=served.llm.max_context,
        type="model",
        display_name=served.name,
        created_at=datetime.fromtimestamp(served.created, timezone.utc).isoformat().replace("+00:00", "Z"),
    )
    return model if served.adapter is None else {**model, "parent": served.base}


async def list_models(context: RequestContext, body: Any) -> ASGIApp:
    data = [_model(served) for model in context.server.models for served in model.with_adapters()]
    return JSONResponse(Models(object="list", data=data, has_more=False, first_id=data[0]["id"], last_id=data[-1]["id"]))


async def get_model(context: RequestContext, body: Any) -> ASGIApp:
    return JSONResponse(_model(context.server.models.get(context.path["model"])))


async def create_embeddings(context: RequestContext, body: EmbeddingRequest) -> ASGIApp:
    served = context.server.models.get(body.model)
    raise APIError(400, "unsupported", f"{served.name} writes text and is no embedding model.", param="model", code="unsupported_model")


def routes(server: Server) -> list[Endpoint]:
    """The endpoints of this module."""
    return [
        Endpoint("GET", "/v1/models", list_models, None, Doc("The models that are served", Models), server=server),
        Endpoint("GET", "/v1/models/{model:path}", get_model, None, Doc("One of them", Model), server=server),
        Endpoint("POST", "/v1/embeddings", create_embeddings, EmbeddingRequest, Doc("Vectors for texts", Embeddings), server=server),
    ]
