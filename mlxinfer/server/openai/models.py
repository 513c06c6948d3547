"""`GET /v1/models`, and llama.cpp's `POST /models/load` and `/models/unload`."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.responses import JSONResponse
from starlette.types import ASGIApp
from typing_extensions import NotRequired, TypedDict

from ..errors import invalid
from ..keeping.refusals import reason_of
from ..keeping.slot import Slot
from ..models import Entry
from ..routing import Doc, Endpoint, RequestContext, Server
from ..validation import StrictModel


class Status(TypedDict):
    """As llama.cpp's router tells it: `value` is unloaded, loading or loaded. One that `failed` is unloaded; `reason` says why."""

    value: Literal["unloaded", "loading", "loaded"]
    failed: NotRequired[bool]
    reason: NotRequired[str]


class Model(TypedDict):
    """`max_model_len`, in tokens of prompt and answer together, is vLLM's field, and so is `parent`, the model of an adapter; those from
    `type` on are Anthropic's, whose clients ask at the same path; `status` is llama.cpp's."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    parent: NotRequired[str]
    type: Literal["model"]
    display_name: str
    created_at: str
    status: Status


class Models(TypedDict):
    """All models are on one page, as the fields from `has_more` on tell Anthropic's clients."""

    object: Literal["list"]
    data: list[Model]
    has_more: Literal[False]
    first_id: str
    last_id: str


class Loading(StrictModel):
    """The body of `POST /models/load` and `/models/unload`."""

    model: Annotated[str, Field(max_length=256)]


class Success(TypedDict):
    success: Literal[True]


async def _model(context: RequestContext, name: str, entry: Entry) -> Model:
    sheet = await context.server.keeper.sheet(entry.slot)
    model = Model(
        id=name,
        object="model",
        created=entry.created,
        owned_by="mlxinfer",
        max_model_len=sheet.max_context if sheet else 0,
        type="model",
        display_name=name,
        created_at=datetime.fromtimestamp(entry.created, timezone.utc).isoformat().replace("+00:00", "Z"),
        status=_status(entry.slot),
    )
    return model if entry.adapter is None else {**model, "parent": entry.base}


def _status(slot: Slot) -> Status:
    if slot.state == "failed" or slot.broken:
        return Status(value="unloaded", failed=True, reason=reason_of(slot))
    return Status(value="loaded" if slot.state == "ready" else "loading" if slot.state == "loading" or slot.waiting else "unloaded")


async def list_models(context: RequestContext, body: Any) -> ASGIApp:
    data = [await _model(context, name, entry) for name, entry in context.server.models.listed()]
    return JSONResponse(Models(object="list", data=data, has_more=False, first_id=data[0]["id"], last_id=data[-1]["id"]))


async def get_model(context: RequestContext, body: Any) -> ASGIApp:
    entry = context.server.models.entry(context.path["model"])
    return JSONResponse(await _model(context, entry.name, entry))


async def load(context: RequestContext, body: Loading) -> ASGIApp:
    """Begins to load; `GET /v1/models` tells when it is done."""
    context.server.keeper.start_loading(context.server.models.entry(body.model).slot)
    return JSONResponse(Success(success=True))


async def unload(context: RequestContext, body: Loading) -> ASGIApp:
    """Unloads as soon as the model's requests have ended. One that is pinned is refused, as it would stay."""
    entry = context.server.models.entry(body.model)
    if entry.slot.pinned:
        raise invalid(f"{entry.base!r} is pinned: it is never unloaded", "model", "model_pinned")
    context.server.keeper.unload(entry.slot)
    return JSONResponse(Success(success=True))


def routes(server: Server) -> list[Endpoint]:
    """The endpoints of this module."""
    return [
        Endpoint("GET", "/v1/models", list_models, None, Doc("The models that are served", Models), server=server),
        Endpoint("GET", "/models", list_models, None, Doc("The same, where llama.cpp has it", Models), server=server),
        Endpoint("POST", "/models/load", load, Loading, Doc("Begin to load a model", Success), server=server),
        Endpoint("POST", "/models/unload", unload, Loading, Doc("Unload a model as soon as it is idle", Success), server=server),
        Endpoint("GET", "/v1/models/{model:path}", get_model, None, Doc("One of them", Model), server=server),
    ]
