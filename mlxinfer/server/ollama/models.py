"""What is served: `/api/tags`, `/api/ps`, `/api/show`, `/api/version` and `/`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp
from typing_extensions import TypedDict

from ..fields import Body, Only
from ..problems import Problem
from ..routing import Call, Doc, Endpoint, Server
from .card import Card, Details
from .names import find, tagged
from .options import Options

VERSION = "0.12.11"
"""Of the Ollama whose API this is: clients ask for it to know what they may use. It is the first one with log-probabilities."""
_FOREVER = "9999-12-31T23:59:59Z"


class ListedModel(TypedDict):
    """`size` is that of the files."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details


class Tags(TypedDict):
    models: list[ListedModel]


class RunningModel(TypedDict):
    """`size` is all the memory it may take, `size_vram` what of it a GPU uses."""

    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: str
    size_vram: int
    context_length: int


class Running(TypedDict):
    models: list[RunningModel]


class Shown(TypedDict):
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class Version(TypedDict):
    version: str


class ShowRequest(Body):
    """`name` is what older clients call the model."""

    model: Annotated[str, Field(max_length=256)] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    verbose: Annotated[Any, Only(False)] = None
    system: Annotated[Any, Only("")] = None
    template: Annotated[Any, Only("")] = None
    options: Options | None = None


async def tags(call: Call, body: Any) -> ASGIApp:
    cards = [Card(served) for served in call.server.models]
    return JSONResponse(
        Tags(
            models=[
                ListedModel(
                    name=tagged(card.served),
                    model=tagged(card.served),
                    modified_at=card.modified_at,
                    size=card.summary.nbytes,
                    digest=card.digest,
                    details=card.details,
                )
                for card in cards
            ]
        )
    )


async def running(call: Call, body: Any) -> ASGIApp:
    return JSONResponse(Running(models=[_running(Card(served)) for served in call.server.models]))


def _running(card: Card) -> RunningModel:
    name, llm = tagged(card.served), card.served.llm
    return RunningModel(
        name=name,
        model=name,
        size=llm.memory_bytes,
        digest=card.digest,
        details=card.details,
        expires_at=_FOREVER,
        size_vram=card.gpu_bytes,
        context_length=llm.max_context,
    )


async def show(call: Call, body: ShowRequest) -> ASGIApp:
    name = body.model or body.name
    if not name:
        raise Problem(400, "invalid", "model is required", param="model", code="missing_required_parameter")
    card = Card(find(call.server.models, name))
    return JSONResponse(
        Shown(
            parameters=card.parameters,
            template=card.served.llm.tokenizer.chat_template or "",
            details=card.details,
            model_info=card.info,
            capabilities=["completion"],
            modified_at=card.modified_at,
        )
    )


async def version(call: Call, body: Any) -> ASGIApp:
    return JSONResponse(Version(version=VERSION))


async def root(call: Call, body: Any) -> ASGIApp:
    return PlainTextResponse("Ollama is running")


def routes(server: Server) -> list[Endpoint]:
    return [
        Endpoint("GET", "/api/tags", tags, None, Doc("The models that are served", Tags), server=server),
        Endpoint("GET", "/api/ps", running, None, Doc("The same with their memory", Running), server=server),
        Endpoint("POST", "/api/show", show, ShowRequest, Doc("What a model is", Shown), server=server, unsaid=True),
        Endpoint("GET", "/api/version", version, None, Doc("The version of this API", Version), server=server),
        Endpoint("GET", "/", root, None, Doc("For clients of Ollama that look whether it is there", "text/plain"), server=server),
    ]
