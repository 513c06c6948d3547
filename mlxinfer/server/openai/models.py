"""`GET /v1/models`."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any, Literal

from starlette.responses import JSONResponse
from starlette.types import ASGIApp
from typing_extensions import TypedDict

from ..models import ServedModel
from ..routing import Doc, Endpoint, RequestContext, Server


class Model(TypedDict):
    """`max_model_len`, in tokens of prompt and answer together, is vLLM's field; those after it are Anthropic's, whose clients ask at the
    same path."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
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


def _model(served: ServedModel) -> Model:
    return Model(
        id=served.name,
        object="model",
        created=served.created,
        owned_by="mlxinfer",
        max_model_len=served.llm.max_context,
        type="model",
        display_name=served.name,
        created_at=datetime.fromtimestamp(served.created, timezone.utc).isoformat().replace("+00:00", "Z"),
    )


async def list_models(context: RequestContext, body: Any) -> ASGIApp:
    data = [_model(served) for served in context.server.models]
    return JSONResponse(Models(object="list", data=data, has_more=False, first_id=data[0]["id"], last_id=data[-1]["id"]))


async def get_model(context: RequestContext, body: Any) -> ASGIApp:
    return JSONResponse(_model(context.server.models.get(context.path["model"])))


def routes(server: Server) -> list[Endpoint]:
    """The endpoints of this module."""
    return [
        Endpoint("GET", "/v1/models", list_models, None, Doc("The models that are served", Models), server=server),
        Endpoint("GET", "/v1/models/{model:path}", get_model, None, Doc("One of them", Model), server=server),
    ]
