"""Hostile and unusual pictures over HTTP: refused with 400 by the name of their part, or read; memory stays flat, and logs stay empty."""

from __future__ import annotations

import gc
import io
import json
import logging
import re
import resource
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.hostile.cases import request
from support.http.live_server import LiveServer, live_server
from support.http.pictures import HOSTILE, ODD, base64_of, data_url, noise, saved
from support.models.seeing import GOLDEN

from mlxinfer.engine.async_llm import AsyncLLM
from mlxinfer.server import serving
from mlxinfer.server.anthropic.blocks import ImageBlock
from mlxinfer.server.ollama.generate import OllamaGenerateRequest
from mlxinfer.server.ollama.messages import OllamaMessage
from mlxinfer.server.openai.messages import ImagePart
from mlxinfer.server.openai.response_items import InputImage
from mlxinfer.server.settings import Limits
from mlxinfer.server.shared.images import SentImage

CHAT, RESPONSES, CLAUDE, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
PATHS = (CHAT, RESPONSES, CLAUDE, OLLAMA)
WHERE = {
    CHAT: "messages[1].content[0]",
    RESPONSES: "input[1].content[0]",
    CLAUDE: "messages[2].content[0]",
    OLLAMA: "messages[1].images[0]",
}
MODEL = GOLDEN / "smolvlm"


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with live_server({"tiny": lambda: AsyncLLM(MODEL)}) as server:
        yield server


def body(path: str, data: bytes) -> dict[str, Any]:
    """A request whose second message has this picture; of Anthropic's turns it is the third, since answers must come between."""
    text = base64_of(data)
    if path == CHAT:
        part = {"type": "image_url", "image_url": {"url": data_url(data)}}
        return {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": [part]}], "max_tokens": 2}
    if path == RESPONSES:
        items = [{"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "input_image", "image_url": data_url(data)}]}]
        return {"input": items, "max_output_tokens": 2}
    if path == CLAUDE:
        block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": text}}
        turns = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}, {"role": "user", "content": [block]}]
        return {"messages": turns, "max_tokens": 2}
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "A", "images": [text]}]
    return {"messages": messages, "stream": False, "options": {"num_predict": 2}}


def sent(live: LiveServer, path: str, fields: dict[str, Any]) -> tuple[int, str]:
    """Status, and the error's message or the whole answer."""
    raw = json.dumps({"model": "tiny", **fields}).encode()
    status, _, found = live.exchange(request(path, raw, "Content-Type: application/json"))
    answer = json.loads(found)
    error = answer.get("error", found.decode())
    return status, error if isinstance(error, str) else error["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pictures_are_refused_by_name(live: LiveServer, path: str, name: str) -> None:
    status, message = sent(live, path, body(path, HOSTILE[name]))
    assert (status, message.partition(": ")[0]) == (400, WHERE[path])
    assert len(message) < 400
    assert "/etc" not in message


@pytest.mark.parametrize("name", ODD)
def test_unusual_pictures_are_read(live: LiveServer, name: str) -> None:
    assert sent(live, CHAT, body(CHAT, ODD[name]))[0] == 200


@pytest.mark.parametrize("text", ["A", "AB$=", "====", "\u00e9" * 8, base64_of(saved(noise(1)))[:-3], "file:///etc/passwd", "/etc/passwd"])
def test_broken_base64_is_refused(live: LiveServer, text: str) -> None:
    fields = body(OLLAMA, b"")
    fields["messages"][1]["images"] = [text]
    status, message = sent(live, OLLAMA, fields)
    assert (status, message.partition(": ")[0]) == (400, WHERE[OLLAMA])


def _peak() -> float:
    """Peak memory of this process, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


def test_memory_stays_flat(live: LiveServer) -> None:
    small = {name: data for name, data in HOSTILE.items() if len(data) < 1_000_000}
    sent(live, CHAT, body(CHAT, ODD["1 x 1"]))
    before = _peak()
    for data in small.values():
        assert sent(live, CHAT, body(CHAT, data))[0] == 400
    assert _peak() - before < 60
    for data in HOSTILE.values():
        sent(live, CHAT, body(CHAT, data))
    before = _peak()
    for _ in range(2):
        for data in HOSTILE.values():
            sent(live, CHAT, body(CHAT, data))
    assert _peak() - before < 60


def test_many_pictures_of_a_legal_size_do_not_add_up(live: LiveServer) -> None:
    """64 pictures of 16 million pixels: 3 GB, if all were decoded together. The prompt is too long, which their headers tell."""
    file = io.BytesIO()
    from PIL import Image

    Image.new("L", (4000, 4000)).save(file, "PNG")
    part = {"type": "image_url", "image_url": {"url": data_url(file.getvalue())}}
    before = _peak()
    status, message = sent(live, CHAT, {"messages": [{"role": "user", "content": [part] * 64}], "max_tokens": 2})
    assert status == 400
    assert re.search(r"your prompt has \d+ tokens, \d+ of them for images", message)
    status, message = sent(live, CHAT, {"messages": [{"role": "user", "content": [part] * 65}], "max_tokens": 2})
    assert (status, message.partition(": ")[0]) == (400, "messages[0].content[64]")
    assert _peak() - before < 150


def test_a_full_queue_refuses_and_text_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    going, begun = threading.Event(), threading.Semaphore(0)
    original = SentImage.decoded

    def decoded(self: SentImage) -> bytes:
        begun.release()
        assert going.wait(30)
        return original(self)

    monkeypatch.setattr(SentImage, "decoded", decoded)
    picture = body(CHAT, saved(noise(1)))
    limits = Limits(picture_requests=2, picture_queue=0)
    with live_server({"tiny": lambda: AsyncLLM(MODEL)}, limits=limits) as server, ThreadPoolExecutor(2) as pool:
        running = [pool.submit(sent, server, CHAT, picture) for _ in range(2)]
        assert all(begun.acquire(timeout=30) for _ in running)
        raw = json.dumps({"model": "tiny", **picture}).encode()
        status, headers, _ = server.exchange(request(CHAT, raw, "Content-Type: application/json"))
        assert (status, "retry-after" in headers) == (429, True)
        text = {"messages": [{"role": "user", "content": "A"}], "max_tokens": 2}
        assert sent(server, CHAT, text)[0] == 200
        going.set()
        assert [each.result()[0] for each in running] == [200, 200]


def test_bodies_are_longer_for_models_that_see(tiny_path: Path) -> None:
    limits = Limits(body_bytes=20_000, image_body_bytes=200_000)
    long = {"messages": [{"role": "user", "content": "A" * 50_000}], "max_tokens": 2}
    with live_server({"tiny": lambda: AsyncLLM(MODEL), "text": lambda: AsyncLLM(tiny_path)}, limits=limits) as server:
        assert sent(server, CHAT, body(CHAT, saved(noise(1, (150, 100)))))[0] == 200
        assert sent(server, CHAT, {**long, "model": "text"})[0] == 413
        assert sent(server, CHAT, {**long, "messages": [{"role": "user", "content": "A" * 250_000}]})[0] == 413
        assert sent(server, "/v1/completions", {"prompt": "A" * 50_000})[0] == 413
    with live_server({"tiny": lambda: AsyncLLM(tiny_path)}, limits=limits) as server:
        assert sent(server, CHAT, long)[0] == 413


def _images_in_memory() -> int:
    """Number of images of requests, as sent."""
    kinds = (ImagePart, InputImage, ImageBlock, SentImage)
    ollamas = (OllamaMessage, OllamaGenerateRequest)
    return sum(isinstance(one, kinds) or (isinstance(one, ollamas) and bool(one.images)) for one in gc.get_objects())


@pytest.mark.parametrize("path", [*PATHS, "/api/generate"])
@pytest.mark.parametrize("stream", [False, True])
def test_no_picture_stays_while_its_answer_is_written(live: LiveServer, path: str, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    begin, calls = serving.begin, []

    def looking(*given: Any) -> Any:
        calls.append(path)
        deadline = time.monotonic() + 20
        while _images_in_memory() and time.monotonic() < deadline:
            gc.collect()  # the thread that decoded may still be about to drop its work
        held.append(_images_in_memory())
        return begin(*given)

    monkeypatch.setattr(serving, "begin", looking)
    fields = {"prompt": "A", "images": [base64_of(ODD["BMP"])]} if path == "/api/generate" else body(path, ODD["BMP"])
    raw = json.dumps({"model": "tiny", **fields, "stream": stream}).encode()
    assert live.exchange(request(path, raw, "Content-Type: application/json"))[0] == 200
    assert (calls, held) == ([path], [0])


def test_logs_have_no_picture(live: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for name in ("mlxinfer", "mlxinfer.access"):
        monkeyed = logging.getLogger(name)
        monkeyed.propagate = True
        monkeyed.setLevel(logging.DEBUG)
    picture = saved(noise(31))
    assert sent(live, CHAT, body(CHAT, picture))[0] == 200
    assert sent(live, CHAT, body(CHAT, picture[:-700]))[0] == 400
    live.until(lambda _: sum(record.name == "mlxinfer.access" for record in caplog.records) >= 2)
    lines = "\n".join(f"{record.getMessage()} {getattr(record, 'fields', '')}" for record in caplog.records)
    assert "image_tokens" in lines
    assert base64_of(picture)[:24] not in lines
    assert base64_of(picture)[200:224] not in lines
