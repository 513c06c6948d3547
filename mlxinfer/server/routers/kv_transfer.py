"""Gives cached prefixes to other machines: `mlxinfer serve --kv-producer` reads prompts for servers that run with `--prefill-from`
(docs/several-machines.md).

A first request has a prompt read and returns the list of its pages. A second request fetches pages and snapshots, each in the file
format of the prefix cache on disk.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any

from pydantic import Field
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp
from typing_extensions import TypedDict

from ...cache.disk.kv_export import KVExport, Wanted
from ...cache.disk.remote import PAGES, PREFILL
from ...errors import SettingError
from ...types import SamplingParams
from .. import sse
from ..errors import APIError
from ..model_manager.registry import ServedModel
from ..routing import Doc, Endpoint, RequestContext, Server
from ..validation import FIRST_ERROR_ONLY, StrictModel

_MOST_PAGES = 1 << 16
_AT_ONCE = 4 << 20
"""Approximate bytes copied between two steps."""

_Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_Part = Annotated[str, Field(pattern="^[a-z]{1,16}[0-9]{0,9}$")]
_Token = Annotated[int, Field(ge=0, lt=2**31)]


class PrefillRequest(StrictModel):
    """A prompt to read. `root` identifies the model and the page format: it covers all that pages depend on besides tokens."""

    root: _Digest
    tokens: Annotated[list[_Token], Field(min_length=1), FIRST_ERROR_ONLY]


class PagesRequest(StrictModel):
    """Pages and snapshots: for each the digest of its node and of the previous node, and its group of layers."""

    root: _Digest
    pages: Annotated[list[tuple[_Digest, _Digest, _Part]], Field(min_length=1, max_length=_MOST_PAGES), FIRST_ERROR_ONLY]


class Prefilled(TypedDict):
    """File names of all cached pages and snapshots of a prompt."""

    pages: list[str]


async def prefill(context: RequestContext, body: PrefillRequest) -> ASGIApp:
    """Respond once the prompt is read."""
    served = await _model_with_root(context, body.root)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    await sse.unless_gone(context.receive, served.llm.generate(body.tokens, params, client_id=context.client_id("")))
    context.log["prompt_tokens"] = len(body.tokens)
    return JSONResponse(Prefilled(pages=await served.llm.hand_out(lambda export: export.names(body.tokens))))


async def pages(context: RequestContext, body: PagesRequest) -> ASGIApp:
    """The files one after another, up to the first missing file."""
    served = await _model_with_root(context, body.root)
    wanted = [(bytes.fromhex(digest), bytes.fromhex(parent), part) for digest, parent, part in body.pages]
    return StreamingResponse(_files(served, wanted), media_type="application/octet-stream")


async def _files(served: ServedModel, wanted: list[Wanted]) -> AsyncIterator[bytes]:
    at = 0
    while at < len(wanted):
        found = await served.llm.hand_out(partial(_copy_files, wanted, at))
        if not found:
            return
        at += len(found)
        for each in found:
            yield each


def _copy_files(wanted: list[Wanted], at: int, export: KVExport) -> list[bytes]:
    """Some files from the index `at` on; none if the file at this index is missing."""
    found: list[bytes] = []
    while at + len(found) < len(wanted) and sum(map(len, found)) < _AT_ONCE:
        file = export.file(wanted[at + len(found)])
        if file is None:
            break
        found.append(file)
    return found


async def _model_with_root(context: RequestContext, root: str) -> ServedModel:
    """The loaded model whose pages have this root. Raises `APIError`."""
    refused = ""
    for entry in context.server.models:
        if entry.slot.llm is None or entry.slot.broken:
            continue
        served = await context.use(entry)
        try:
            if (await served.llm.hand_out(lambda export: export.root)).hex() == root:
                return served
        except SettingError as error:
            refused = str(error)
    if refused:
        raise APIError(403, "permission", f"{refused[:1].upper()}{refused[1:]}.", code="no_kv_producer")
    message = "No model that is loaded here computes the same: it has to be the same files, versions, settings and kind of machine."
    raise APIError(404, "not_found", message, code="not_found")


def routes(server: Server) -> list[Endpoint]:
    asked: tuple[tuple[str, Any, type[StrictModel], Doc], ...] = (
        (PREFILL, prefill, PrefillRequest, Doc("Read a prompt for another machine", Prefilled, statuses=(404,))),
        (PAGES, pages, PagesRequest, Doc("Pages of the prefix cache", "application/octet-stream", statuses=(404,))),
    )
    return [Endpoint("POST", path, handler, body, doc, server=server) for path, handler, body, doc in asked]
