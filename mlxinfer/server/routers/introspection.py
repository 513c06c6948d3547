"""Endpoints for routers: the worker's identity, capacity and load (docs/routers.md).

The paths and fields are those of SGLang and vLLM. SMG (https://github.com/lightseekorg/smg), vLLM's production stack and Dynamo's
frontends read them.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any, Literal

from starlette.responses import JSONResponse
from starlette.types import ASGIApp
from typing_extensions import TypedDict

from ..._version import __version__
from ...cache.pages import PAGE
from ..errors import APIError
from ..model_manager.registry import ServedModel
from ..routing import Doc, Endpoint, RequestContext, Server


class VersionReply(TypedDict):
    """vLLM's `/version`."""

    version: str


class ModelDescription(TypedDict):
    """SGLang's `/model_info`. Names replace paths, because models have no paths over HTTP."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: bool
    model_type: str
    architectures: list[str]
    max_context_length: int
    weight_version: str
    has_image_understanding: bool
    has_audio_understanding: bool


class ServerDescription(TypedDict):
    """SGLang's `/server_info` of the first model, with vLLM's names where both have a field."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    version: str
    engine: Literal["mlxinfer"]
    tp_size: int
    dp_size: int
    context_length: int
    max_model_len: int
    max_running_requests: int
    max_num_seqs: int
    max_total_num_tokens: int
    page_size: int
    models: list[ModelDescription]


class ModelLoad(TypedDict):
    """The load of one model; SGLang reports it per rank."""

    dp_rank: int
    model: str
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    utilization: float
    max_running_requests: int
    cache_hit_rate: float


class TotalLoad(TypedDict):
    """The load of all models together."""

    total_running_reqs: int
    total_waiting_reqs: int
    total_reqs: int
    avg_token_usage: float
    avg_utilization: float


class Loads(TypedDict):
    """SGLang's `/v1/loads`."""

    timestamp: str
    version: str
    dp_rank_count: int
    loads: list[ModelLoad]
    aggregate: TotalLoad


def _ready(context: RequestContext) -> list[ServedModel]:
    """The models that are loaded and running, by all their names."""
    found = [(entry.name, entry.slot) for entry in context.server.models if not entry.slot.broken]
    return [ServedModel(name, slot.llm) for name, slot in found if slot.llm is not None]


def _describe_model(served: ServedModel) -> ModelDescription:
    config = served.llm.config
    return ModelDescription(
        model_path=served.name,
        tokenizer_path=served.name,
        served_model_name=served.name,
        is_generation=True,
        model_type=str(config.get("model_type", "")),
        architectures=[str(name) for name in config.get("architectures") or ()],
        max_context_length=served.llm.max_context,
        weight_version="default",
        has_image_understanding=served.blind_reason is None,
        has_audio_understanding=False,
    )


def _load(rank: int, served: ServedModel) -> ModelLoad:
    stats, seats = served.llm.stats(), served.llm.plan.max_num_seqs
    used = stats.pages_used / stats.pages if stats.pages else 0.0
    return ModelLoad(
        dp_rank=rank,
        model=served.name,
        num_running_reqs=stats.running,
        num_waiting_reqs=stats.waiting,
        num_total_reqs=stats.running + stats.waiting,
        num_used_tokens=stats.pages_used * PAGE,
        max_total_num_tokens=stats.pages * PAGE,
        token_usage=round(used, 4),
        utilization=round(max(used, min(stats.running / seats, 1.0)), 4),
        max_running_requests=seats,
        cache_hit_rate=round(stats.reused_tokens / stats.prompt_tokens, 4) if stats.prompt_tokens else 0.0,
    )


def _loads(context: RequestContext) -> Loads:
    names = {slot.name for slot in context.server.models.slots}  # each model once, without its further names
    loads = [_load(rank, served) for rank, served in enumerate(each for each in _ready(context) if each.name in names)]
    running, waiting = (sum(load[name] for load in loads) for name in ("num_running_reqs", "num_waiting_reqs"))
    means = [sum(load[name] for load in loads) / max(len(loads), 1) for name in ("token_usage", "utilization")]
    return Loads(
        timestamp=datetime.now(timezone.utc).isoformat(),
        version=__version__,
        dp_rank_count=len(loads),
        loads=loads,
        aggregate=TotalLoad(
            total_running_reqs=running,
            total_waiting_reqs=waiting,
            total_reqs=running + waiting,
            avg_token_usage=round(means[0], 4),
            avg_utilization=round(means[1], 4),
        ),
    )


def _first(context: RequestContext) -> ServedModel:
    """The first loaded model. Raises `APIError` (503) if no model is loaded."""
    found = _ready(context)
    if not found:
        raise APIError(503, "overloaded", "No model is loaded.", code="no_model_loaded")
    return found[0]


async def version(context: RequestContext, body: Any) -> ASGIApp:
    return JSONResponse(VersionReply(version=__version__))


async def model_info(context: RequestContext, body: Any) -> ASGIApp:
    return JSONResponse(_describe_model(_first(context)))


async def server_info(context: RequestContext, body: Any) -> ASGIApp:
    first = _first(context)
    load = _load(0, first)
    return JSONResponse(
        ServerDescription(
            model_path=first.name,
            tokenizer_path=first.name,
            served_model_name=first.name,
            version=__version__,
            engine="mlxinfer",
            tp_size=1,
            dp_size=1,
            context_length=first.llm.max_context,
            max_model_len=first.llm.max_context,
            max_running_requests=load["max_running_requests"],
            max_num_seqs=load["max_running_requests"],
            max_total_num_tokens=load["max_total_num_tokens"],
            page_size=PAGE,
            models=[_describe_model(each) for each in _ready(context)],
        )
    )


async def loads(context: RequestContext, body: Any) -> ASGIApp:
    return JSONResponse(_loads(context))


def routes(server: Server) -> list[Endpoint]:
    """Each endpoint under the paths of the different routers."""
    asked = (
        (("/version",), version, Doc("The version, for routers", VersionReply)),
        (("/model_info", "/get_model_info"), model_info, Doc("The first model, for routers", ModelDescription)),
        (("/server_info", "/get_server_info"), server_info, Doc("Capacity of this worker, for routers", ServerDescription)),
        (("/v1/loads", "/loads"), loads, Doc("Load of each model, for routers", Loads)),
    )
    return [Endpoint("GET", path, handler, None, doc, server=server) for paths, handler, doc in asked for path in paths]
