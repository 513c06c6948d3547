"""`GET /v1/models`, and llama.cpp's `POST /models/load` and `/models/unload` and `GET /models/sse`.

Source: tools/server/README.md of https://github.com/ggml-org/llama.cpp, "Using multiple models".
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from datetime import datetime, timezone
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.responses import JSONResponse
from starlette.types import ASGIApp
from typing_extensions import NotRequired, TypedDict

from ...config import chat_params
from .. import sse
from ..errors import invalid
from ..model_manager.model_slot import ModelSlot
from ..model_manager.refusals import reason_of
from ..model_manager.registry import ModelEntry
from ..routing import Doc, Endpoint, RequestContext, Server
from ..validation import StrictModel

_LOOK_S = 0.25
"""Interval in seconds at which a stream of events checks if the server stops."""


class ModelStatus(TypedDict):
    """The status in llama.cpp's words. A model that `failed`, or whose files are broken, is "unloaded"; `reason` gives the error."""

    value: Literal["unloaded", "loading", "loaded"]
    failed: NotRequired[bool]
    reason: NotRequired[str]


class ConversationDefaults(TypedDict):
    """Sampling parameters of a new conversation on the page: see `chat_params`."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float


class Modalities(TypedDict):
    """Kinds of input and output, as in llama.cpp and OpenRouter."""

    input_modalities: list[str]
    output_modalities: list[str]


class ModelObject(TypedDict):
    """`max_model_len` (tokens of prompt and answer together) and `parent` (the base model of an adapter) are vLLM's fields. Fields from
    `type` on are Anthropic's, whose clients use the same path. `status` is llama.cpp's, `capabilities` has Ollama's words, and
    `conversation` is for the page. The fields from `capabilities` on are missing if the model's files cannot be read."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    parent: NotRequired[str]
    type: Literal["model"]
    display_name: str
    created_at: str
    status: ModelStatus
    capabilities: NotRequired[list[str]]
    architecture: NotRequired[Modalities]
    conversation: NotRequired[ConversationDefaults]


class ModelList(TypedDict):
    """All models are on one page; the fields from `has_more` on say so to Anthropic's clients."""

    object: Literal["list"]
    data: list[ModelObject]
    has_more: Literal[False]
    first_id: str
    last_id: str


class LoadRequest(StrictModel):
    """The body of `POST /models/load` and `/models/unload`."""

    model: Annotated[str, Field(max_length=256)]


class Success(TypedDict):
    success: Literal[True]


async def _model_object(context: RequestContext, name: str, entry: ModelEntry) -> ModelObject:
    card = await context.server.manager.card(entry.slot)
    model = ModelObject(
        id=name,
        object="model",
        created=entry.created,
        owned_by="mlxinfer",
        max_model_len=card.max_context if card else 0,
        type="model",
        display_name=name,
        created_at=datetime.fromtimestamp(entry.created, timezone.utc).isoformat().replace("+00:00", "Z"),
        status=model_status(entry.slot),
    )
    if card is not None:
        params = chat_params(card.default_params)
        model["capabilities"] = card.capabilities
        model["architecture"] = Modalities(input_modalities=card.input_modalities, output_modalities=["text"])
        model["conversation"] = ConversationDefaults(
            temperature=params.temperature or 0.0, top_p=params.top_p or 1.0, top_k=params.top_k or 0, min_p=params.min_p or 0.0
        )
    return model if entry.adapter is None else {**model, "parent": entry.base}


def model_status(slot: ModelSlot) -> ModelStatus:
    unreadable = slot.state == "listed" and slot.card is None and slot.unreadable is not None
    if slot.state == "failed" or slot.broken or unreadable:
        return ModelStatus(value="unloaded", failed=True, reason=reason_of(slot))
    return ModelStatus(value="loaded" if slot.state == "ready" else "loading" if slot.state == "loading" or slot.waiting else "unloaded")


async def list_models(context: RequestContext, body: Any) -> ASGIApp:
    data = [await _model_object(context, name, entry) for name, entry in context.server.models.listed()]
    return JSONResponse(ModelList(object="list", data=data, has_more=False, first_id=data[0]["id"], last_id=data[-1]["id"]))


async def get_model(context: RequestContext, body: Any) -> ASGIApp:
    entry = context.server.models.entry(context.path["model"])
    return JSONResponse(await _model_object(context, entry.name, entry))


async def load(context: RequestContext, body: LoadRequest) -> ASGIApp:
    """Start loading a model; `GET /v1/models` reports the status."""
    context.server.manager.start_loading(context.server.models.entry(body.model).slot)
    return JSONResponse(Success(success=True))


async def unload(context: RequestContext, body: LoadRequest) -> ASGIApp:
    """Unload a model as soon as its requests have ended. Refused for a pinned model."""
    entry = context.server.models.entry(body.model)
    if entry.slot.pinned:
        raise invalid(f"{entry.base!r} is pinned: it is never unloaded", "model", "model_pinned")
    context.server.manager.unload(entry.slot)
    return JSONResponse(Success(success=True))


class StatusChange(TypedDict):
    """`data` of an event. A model that failed is "unloaded"; `reason` gives the error."""

    status: Literal["unloaded", "loading", "loaded"]
    failed: NotRequired[bool]
    reason: NotRequired[str]


class ModelEvent(TypedDict):
    """An event of `/models/sse`."""

    model: str
    event: Literal["model_status"]
    data: StatusChange


async def events(context: RequestContext, body: Any) -> ASGIApp:
    """An event for each change of a model's status from now on, until the client disconnects or the server stops."""
    return sse.Stream(_model_events(context), failed=lambda error: sse.data({"error": error.message}), limits=context.limits)


async def _model_events(context: RequestContext) -> AsyncGenerator[bytes, None]:
    changed: asyncio.Queue[tuple[ModelSlot, StatusChange]] = asyncio.Queue()
    slots, told = context.server.models.slots, dict[ModelSlot, StatusChange]()

    def watch(slot: ModelSlot) -> None:
        change = _status_change(slot)
        if told.get(slot) != change:
            told[slot] = change
            changed.put_nowait((slot, change))

    for slot in slots:
        told[slot] = _status_change(slot)
        slot.watchers.add(watch)
    try:
        yield b""  # sends the status at once
        while not context.server.draining.is_set():
            with suppress(asyncio.TimeoutError):
                slot, change = await asyncio.wait_for(changed.get(), _LOOK_S)
                for name in slot.names:
                    yield sse.data(ModelEvent(model=name, event="model_status", data=change))
    finally:
        for slot in slots:
            slot.watchers.discard(watch)


def _status_change(slot: ModelSlot) -> StatusChange:
    if slot.state == "failed":
        return StatusChange(status="unloaded", failed=True, reason=reason_of(slot))
    return StatusChange(status="loaded" if slot.state == "ready" else "loading" if slot.state == "loading" else "unloaded")


def routes(server: Server) -> list[Endpoint]:
    return [
        Endpoint("GET", "/v1/models", list_models, None, Doc("The models that are served", ModelList), server=server),
        Endpoint("GET", "/models", list_models, None, Doc("The same at the path of llama.cpp", ModelList), server=server),
        Endpoint("POST", "/models/load", load, LoadRequest, Doc("Start loading a model", Success), server=server),
        Endpoint("POST", "/models/unload", unload, LoadRequest, Doc("Unload a model as soon as it is idle", Success), server=server),
        Endpoint(
            "GET", "/models/sse", events, None, Doc("Changes of the models' status, as in llama.cpp", sse.EVENT_STREAM), server=server
        ),
        Endpoint("GET", "/v1/models/{model:path}", get_model, None, Doc("One of the models", ModelObject), server=server),
    ]
