"""The steps of docs/add-a-dialect.md, for a dialect with one endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse
from starlette.types import ASGIApp
from support.hostile.cases import request
from support.http.live_server import LiveServer, live_server
from typing_extensions import TypedDict

from mlxinfer.engine.async_llm import AsyncLLM
from mlxinfer.server import app, sse
from mlxinfer.server.errors import APIError
from mlxinfer.server.routing import Dialect, Doc, Endpoint, RequestContext, Server
from mlxinfer.server.serving import GenerateRequest, complete, encode_text, stream
from mlxinfer.server.validation import StrictModel
from mlxinfer.types import Chunk, SamplingParams


# toy/protocol.py
class ContinueRequest(StrictModel):
    """The body of `POST /toy/continue`."""

    model: str
    text: str
    words: int = 5
    stream: bool = False


class Continued(TypedDict):
    more: str


def error_object(error: APIError) -> dict[str, str]:
    return {"wrong": error.message}


# toy/continue_text.py
async def continue_text(context: RequestContext, body: ContinueRequest) -> ASGIApp:
    served = await context.model(body.model)
    prompt = await encode_text(served, body.text)
    generate = GenerateRequest(served, prompt, SamplingParams(temperature=0, max_tokens=body.words))
    if body.stream:
        pieces = stream(context, generate, render)
        return sse.Stream(pieces, failed=lambda error: sse.line(error_object(error)), limits=context.limits, media_type=sse.JSON_LINES)
    (answer,) = await sse.unless_gone(context.receive, complete(context, generate))
    return JSONResponse(Continued(more=answer.text))


def render(chunks: list[Chunk]) -> bytes:
    return b"".join(sse.line(Continued(more=chunk.text)) for chunk in chunks if chunk.text)


def routes(server: Server) -> list[Endpoint]:
    doc = Doc("How a text goes on", Continued, streams=sse.JSON_LINES)
    return [Endpoint("POST", "/toy/continue", continue_text, ContinueRequest, doc, server=server)]


# toy/__init__.py
DIALECT = Dialect("toy", ("/toy/",), routes, lambda error: JSONResponse(error_object(error), error.status))


@pytest.fixture(scope="module")
def toy(tiny_path: Path) -> Iterator[LiveServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "DIALECTS", (DIALECT, *app.DIALECTS))
        with live_server({"tiny": lambda: AsyncLLM(tiny_path)}) as server:
            yield server


def post(live: LiveServer, **body: Any) -> tuple[int, dict[str, str], bytes]:
    raw = json.dumps({"model": "tiny", "text": "Hello", **body}).encode()
    return live.exchange(request("/toy/continue", raw, "Content-Type: application/json"))


def test_it_answers_whole_and_streamed(toy: LiveServer) -> None:
    status, _, whole = post(toy)
    assert status == 200
    status, headers, lines = post(toy, stream=True)
    assert (status, headers["content-type"]) == (200, sse.JSON_LINES)
    assert "".join(json.loads(line)["more"] for line in lines.splitlines()) == json.loads(whole)["more"] != ""


@pytest.mark.parametrize(("body", "status"), [({"model": "other"}, 404), ({"colour": "red"}, 400), ({"words": "5"}, 400)], ids=str)
def test_it_renders_errors_in_its_own_shape(toy: LiveServer, body: dict[str, Any], status: int) -> None:
    found, _, raw = post(toy, **body)
    assert (found, list(json.loads(raw))) == (status, ["wrong"])


def test_paths_below_its_prefix_are_its_own_and_others_are_not(toy: LiveServer) -> None:
    assert list(json.loads(toy.exchange(request("/toy/nothing", method="GET"))[2])) == ["wrong"]
    assert list(json.loads(toy.exchange(request("/v1/nothing", method="GET"))[2])) == ["error"]


def test_it_is_documented_and_counted(toy: LiveServer) -> None:
    assert "/toy/continue" in json.loads(toy.exchange(request("/openapi.json", method="GET"))[2])["paths"]
    post(toy)
    assert b'path="/toy/continue"' in toy.exchange(request("/metrics", method="GET"))[2]


def test_a_client_that_leaves_stops_its_request(toy: LiveServer) -> None:
    connection = toy.connect(unix=True)
    raw = json.dumps({"model": "tiny", "text": "Hello", "words": 3000, "stream": True}).encode()
    connection.sendall(request("/toy/continue", raw, "Content-Type: application/json"))
    toy.until(lambda s: s.running > 0)
    connection.close()
    assert toy.until(lambda s: s.running == s.waiting == 0).completion_tokens < 3000
