"""vLLM's `POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, if the server allows them. Adapters are loaded from one folder, by
name.

Source: `vllm/entrypoints/openai/protocol.py` and `serving_models.py` of https://github.com/vllm-project/vllm.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable
from pathlib import Path
from typing import Annotated

from pydantic import Field
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp

from ...errors import CheckpointError, MemoryPlanError, SettingError
from ..errors import APIError, invalid
from ..model_manager.refusals import without_paths
from ..model_manager.registry import ModelEntry
from ..routing import Doc, Endpoint, RequestContext, Server
from ..validation import Ignored, StrictModel, Unsupported

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MOST_PARTS = 4
_Name = Annotated[str, Field(min_length=1, max_length=256)]


class LoadAdapter(StrictModel):
    """`lora_name` is `NAME`, or `MODEL:NAME` if several models are served. `lora_path` is relative to the server's folder."""

    lora_name: _Name
    lora_path: _Name
    load_inplace: Annotated[bool, Unsupported(False, why="not supported: unload the adapter first")] = False


class UnloadAdapter(StrictModel):
    """`lora_name` as for loading."""

    lora_name: _Name
    lora_int_id: Annotated[int | None, Ignored("adapters have names only")] = None


async def load(context: RequestContext, body: LoadAdapter) -> ASGIApp:
    """Respond once requests can use the adapter."""
    place = _adapter_path(context, body.lora_path)
    entry, name = _model_and_adapter(context, body.lora_name)
    served = await context.use(entry)
    await _apply(context, served.llm.load_adapter(name, place))
    entry.slot.add_adapter(name, place)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload(context: RequestContext, body: UnloadAdapter) -> ASGIApp:
    """Unload an adapter. Running requests keep it until they end."""
    _folder(context)
    entry, name = _model_and_adapter(context, body.lora_name)
    if name not in entry.slot.adapters:
        raise APIError(404, "not_found", f"The lora adapter {name!r} cannot be found.", param="lora_name", code="not_found")
    served = await context.use(entry)
    await _apply(context, served.llm.unload_adapter(name))
    entry.slot.remove_adapter(name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _folder(context: RequestContext) -> Path:
    """The folder of loadable adapters. Raises `APIError` (403) if loading is not allowed."""
    folder = context.server.settings.adapters_dir
    if folder is None:
        message = "Adapters cannot be loaded or unloaded here: start the server with --allow-adapter-loading DIR."
        raise APIError(403, "permission", message, code="adapter_loading_not_allowed")
    return folder


def _adapter_path(context: RequestContext, path: str) -> Path:
    """The adapter at this path in the server's folder. Raises `APIError` if it does not exist or lies outside the folder."""
    folder = _folder(context)
    parts = path.split("/")
    if len(parts) > _MOST_PARTS or not all(map(_PART.fullmatch, parts)):
        message = "lora_path is the name of an adapter in the server's folder, such as sql or team/sql.gguf: no other path is taken"
        raise invalid(message, "lora_path", "invalid_value")
    root = folder.expanduser().resolve()
    place = root.joinpath(*parts)
    if not place.exists() or not place.resolve().is_relative_to(root):
        raise APIError(404, "not_found", f"There is no adapter {path!r} in the server's folder.", param="lora_path", code="not_found")
    return place


def _model_and_adapter(context: RequestContext, name: str) -> tuple[ModelEntry, str]:
    """The model that an adapter is for, and the adapter's own name. Raises `APIError`."""
    models = context.server.models
    base, _, own = name.rpartition(":")
    if base:
        return models.entry(base), own
    if len(models.slots) > 1:
        names = ", ".join(slot.name for slot in models.slots)
        raise invalid(f"which model is the adapter for? Say MODEL:{name} as lora_name, of {names}", "lora_name", "invalid_value")
    return next(iter(models)), name


async def _apply(context: RequestContext, change: Awaitable[None]) -> None:
    """Wait for a change. Errors that the client can fix become status 400, without the paths of files."""
    try:
        await change
    except (CheckpointError, SettingError, MemoryPlanError) as error:
        known = str(error).replace(f"{_folder(context).expanduser().resolve()}/", "")
        raise invalid(without_paths(known), "lora_name", "invalid_value") from None


def routes(server: Server) -> list[Endpoint]:
    asked = (
        ("/v1/load_lora_adapter", load, LoadAdapter, Doc("Load an adapter, if the server allows it", "text/plain", statuses=(404,))),
        ("/v1/unload_lora_adapter", unload, UnloadAdapter, Doc("Unload an adapter", "text/plain", statuses=(404,))),
    )
    return [Endpoint("POST", path, handler, body, doc, server=server) for path, handler, body, doc in asked]
