"""Log lines go to the standard error of the time when they are written."""

from __future__ import annotations

import io
import json
import logging
import re
import sys

import pytest

from mlxinfer.server import log


def test_standard_error_may_be_replaced_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    log.start_logging()
    log.notice("one")
    first.close()
    monkeypatch.setattr(sys, "stderr", second)
    log.notice("two", answer=42)
    assert "Logging error" not in second.getvalue()
    (line,) = map(json.loads, second.getvalue().splitlines())
    assert (line["message"], line["answer"]) == ("two", 42)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def request(**fields: object) -> dict[str, object]:
    return {"request_id": "x", "client": "127.0.0.1", "method": "GET", "route": "/v1/models", "status": 200, "ms": 3.4, **fields}


ASKED = request(method="POST", route="/v1/chat/completions", ms=157.2, model="smollm2", prompt_tokens=31, completion_tokens=4)


def lines(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, log_format: log.LogFormat = "auto") -> list[str]:
    monkeypatch.setattr(sys, "stderr", stream)
    log.start_logging(log_format=log_format)
    log.access(ASKED)
    log.access(request(route="/metrics"))
    log.access(request(route="/page/app.js"))
    log.access(request(route="/"))
    log.access(request(route="/health", status=503, error="overloaded"))
    log.notice("loaded", model="smollm2", seconds=1.234, bytes=98_400_000, limit_bytes=8_596_729_600)
    log.notice("could not be loaded: x.gguf is not a GGUF file", level=logging.ERROR, model="x")
    return stream.getvalue().splitlines()


def test_people_get_one_readable_line_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    found = lines(monkeypatch, Terminal())
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in found)
    assert [line[9:] for line in found] == [
        "POST /v1/chat/completions 200 157 ms smollm2 31+4 tokens",
        "GET /health 503 3 ms overloaded",
        "smollm2: loaded (1.2 s, 98.4 MB in use, 8.60 GB at most)",
        "error: x: could not be loaded: x.gguf is not a GGUF file",
    ]


@pytest.mark.parametrize(("stream", "log_format"), [(io.StringIO(), "auto"), (Terminal(), "json")])
def test_programs_get_json_of_everything(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, log_format: log.LogFormat) -> None:
    found = [json.loads(line) for line in lines(monkeypatch, stream, log_format)]
    assert [line.get("route") for line in found] == ["/v1/chat/completions", "/metrics", "/page/app.js", "/", "/health", None, None]
    assert [line["level"] for line in found] == ["info"] * 6 + ["error"]
    assert "traceback" not in stream.getvalue()


def test_text_can_be_asked_for_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines(monkeypatch, io.StringIO(), "text")[0].endswith("POST /v1/chat/completions 200 157 ms smollm2 31+4 tokens")
