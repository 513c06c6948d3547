"""Is it up, and what has it done."""

from __future__ import annotations

from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp
from typing_extensions import TypedDict

from .._version import __version__
from .routing import Call, Doc, Endpoint, Server


class Health(TypedDict):
    status: str
    version: str
    models: list[str]


async def health(call: Call, body: Any) -> ASGIApp:
    names = [served.name for served in call.server.models]
    failed = [served.name for served in call.server.models if served.llm.ended]
    status = f"{', '.join(failed)} has failed" if failed else "ok"
    return JSONResponse(Health(status=status, version=__version__, models=names), 503 if failed else 200)


async def metrics(call: Call, body: Any) -> ASGIApp:
    return Response(generate_latest(call.server.metrics.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def routes(server: Server) -> list[Endpoint]:
    return [
        Endpoint("GET", "/health", health, None, Doc("Answers as soon as every model is loaded", Health), server=server),
        Endpoint("GET", "/metrics", metrics, None, Doc("Counters for Prometheus", "text/plain"), server=server),
    ]
