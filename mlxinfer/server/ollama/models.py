"""Endpoints that describe the served models: `/api/tags`, `/api/ps`, `/api/show`, `/api/version` and `/`."""

from __future__ import annotations

import hashlib
import time
from datetime import datetime, timezone
from typing import Annotated, Any

from pydantic import Field
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp
from typing_extensions import TypedDict

from ..._version import __version__
from ...loading.find.fingerprint import fingerprint
from ...loading.summary import Summary
from ...models.vlm_text import integer_setting
from ...types import SamplingParams
from ...util.device import is_gpu
from ..errors import APIError
from ..model_manager.model_card import ModelCard
from ..model_manager.model_slot import FOR_EVER, ModelSlot
from ..model_manager.refusals import not_loaded
from ..model_manager.registry import LATEST, ModelEntry, Registry
from ..routing import Doc, Endpoint, RequestContext, Server
from ..validation import Ignored, StrictModel, Unsupported
from .protocol import OllamaOptions

VERSION = "0.14.0"
"""The Ollama version whose API this is; clients use it to select features. It is the first version with Anthropic's messages and
OpenAI's responses. Codex needs 0.13.4."""
_FOREVER = "9999-12-31T23:59:59Z"
"""Time of unloading of a model that stays loaded."""
_LAST_S = 253402300799.0
"""`_FOREVER` in seconds since 1970."""
_SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
"""Config key by GGUF key, which Ollama shows."""
_SHOWN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Sampling parameters in the order of `parameters`."""


def find_entry(models: Registry, name: str) -> ModelEntry:
    """The model with this name. Raises `APIError` with the words that Ollama's clients know."""
    try:
        return models.entry(name)
    except APIError:
        served = ", ".join(tagged(entry.name) for entry in models)
        message = f"model {name[:200]!r} not found; available: {served}"
        raise APIError(404, "not_found", message, param="model", code="model_not_found") from None


def tagged(name: str) -> str:
    """The name with a tag: clients search lists for names with tags."""
    return name if ":" in name else name + LATEST


class OllamaDetails(TypedDict):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel:
    """Facts about a model in the form of Ollama's clients."""

    def __init__(self, name: str, entry: ModelEntry, card: ModelCard) -> None:
        self.name = tagged(name)
        self.card = card
        self.summary: Summary = card.summary
        self._created = entry.created

    @property
    def details(self) -> OllamaDetails:
        family = self.summary.architecture
        return OllamaDetails(
            parent_model="",
            format=self.summary.file_format,
            family=family,
            families=[family],
            parameter_size=human_count(self.summary.parameters),
            quantization_level=self.summary.quantization,
        )

    @property
    def info(self) -> dict[str, Any]:
        """`model_info`. `ARCHITECTURE.context_length` is the served context, which may be shorter than the context of the training."""
        family, card = self.summary.architecture, self.card
        sizes = {f"{family}.{shown}": size for shown, key in _SIZES.items() if (size := integer_setting(card.config, key)) is not None}
        general = {"general.architecture": family, "general.parameter_count": self.summary.parameters}
        return {**general, f"{family}.context_length": card.max_context, f"{family}.vocab_size": card.vocab_size, **sizes}

    @property
    def parameters(self) -> str:
        """The model's default sampling parameters, one a line, without neutral values."""
        own, neutral = self.card.default_params, SamplingParams().resolved()
        lines = [(name, getattr(own, name)) for name in _SHOWN if getattr(own, name) != getattr(neutral, name)]
        return "\n".join(f"{name.replace('repetition', 'repeat'):<30} {value:g}" for name, value in lines)

    @property
    def digest(self) -> str:
        """64 hexadecimal digits that change with the model's files."""
        return hashlib.sha256(fingerprint(self.summary.path).encode()).hexdigest()

    @property
    def modified_at(self) -> str:
        """Modification time of the model's file, in ISO 8601."""
        try:
            seconds = self.summary.path.stat().st_mtime
        except OSError:  # the file was removed meanwhile
            seconds = self._created
        return _iso(seconds)


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")


def human_count(count: int) -> str:
    """A number of parameters as Ollama writes it: 134.52M, 8.0B."""
    for unit, size, digits in (("B", 10**9, 1), ("M", 10**6, 2), ("K", 10**3, 2)):
        if count >= size:
            return f"{count / size:.{digits}f}{unit}"
    return str(count)


class ListedModel(TypedDict):
    """`size` is the number of bytes of the model's files."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class Tags(TypedDict):
    models: list[ListedModel]


class RunningModel(TypedDict):
    """`size` is the number of bytes of the model's weights and cache now, `size_vram` the part of these on a GPU, and `size_limit` the
    maximum. All three are 0 for further names of the same model."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    size_limit: int
    context_length: int


class RunningModels(TypedDict):
    models: list[RunningModel]


class ShowReply(TypedDict):
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(TypedDict):
    """`version` is Ollama's, `mlxinfer` this server's version."""

    version: str
    mlxinfer: str


class ShowRequest(StrictModel):
    """The body of `POST /api/show`. Older clients send `name` instead of `model`."""

    model: Annotated[str, Field(max_length=256)] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    verbose: Annotated[bool, Ignored("tensors and tokens are not listed")] | None = None
    system: Annotated[Any, Unsupported("")] = None
    template: Annotated[Any, Unsupported("")] = None
    options: OllamaOptions | None = None


async def _cards(context: RequestContext) -> list[OllamaModel]:
    """All models whose files can be read."""
    found = [(name, entry, await context.server.manager.card(entry.slot)) for name, entry in context.server.models.listed()]
    return [OllamaModel(name, entry, card) for name, entry, card in found if card is not None]


async def tags(context: RequestContext, body: Any) -> ASGIApp:
    return JSONResponse(
        Tags(
            models=[
                ListedModel(
                    name=model.name,
                    model=model.name,
                    modified_at=model.modified_at,
                    size=model.summary.nbytes,
                    digest=model.digest,
                    details=model.details,
                )
                for model in await _cards(context)
            ]
        )
    )


async def running(context: RequestContext, body: Any) -> ASGIApp:
    loaded = [entry for entry in context.server.models if entry.slot.state == "ready"]
    cards = [(entry, await context.server.manager.card(entry.slot)) for entry in loaded]
    models = [_running(OllamaModel(entry.name, entry, card), entry.slot) for entry, card in cards if card is not None]
    return JSONResponse(RunningModels(models=models))


def _running(model: OllamaModel, slot: ModelSlot) -> RunningModel:
    size, limit = (slot.in_use, slot.planned) if model.name == tagged(slot.name) else (0, 0)
    return RunningModel(
        name=model.name,
        model=model.name,
        size=size,
        digest=model.digest,
        details=model.details,
        expires_at=_expires_at(slot),
        size_vram=size if is_gpu() else 0,
        size_limit=limit,
        context_length=model.card.max_context,
    )


def _expires_at(slot: ModelSlot) -> str:
    """Time at which the model is unloaded if no further request comes."""
    if slot.pinned or slot.keep_alive_s == FOR_EVER:
        return _FOREVER
    left = slot.keep_alive_s if slot.idle_until == FOR_EVER else slot.idle_until - time.monotonic()
    return _iso(min(time.time() + max(left, 0.0), _LAST_S))


async def show(context: RequestContext, body: ShowRequest) -> ASGIApp:
    name = body.model or body.name
    if not name:
        raise APIError(400, "invalid", "model is required", param="model", code="missing_required_parameter")
    entry = find_entry(context.server.models, name)
    card = await context.server.manager.card(entry.slot)
    if card is None:
        raise not_loaded(entry.slot)
    model = OllamaModel(entry.name, entry, card)
    return JSONResponse(
        ShowReply(
            parameters=model.parameters,
            template=card.chat_template or "",
            details=model.details,
            model_info=model.info,
            capabilities=model.card.capabilities,
            modified_at=model.modified_at,
        )
    )


async def version(context: RequestContext, body: Any) -> ASGIApp:
    return JSONResponse(OllamaVersion(version=VERSION, mlxinfer=__version__))


async def root(context: RequestContext, body: Any) -> ASGIApp:
    return PlainTextResponse("Ollama is running")


def routes(server: Server) -> list[Endpoint]:
    return [
        Endpoint("GET", "/api/tags", tags, None, Doc("The models that are served", Tags), server=server),
        Endpoint("GET", "/api/ps", running, None, Doc("The loaded models, with their memory", RunningModels), server=server),
        Endpoint("POST", "/api/show", show, ShowRequest, Doc("Facts about a model", ShowReply), server=server, any_type=True),
        Endpoint("GET", "/api/version", version, None, Doc("The version of this API", OllamaVersion), server=server),
        Endpoint("GET", "/", root, None, Doc("A greeting for clients of Ollama", "text/plain"), server=server),
    ]
