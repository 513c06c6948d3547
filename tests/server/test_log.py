"""Lines of the server go to standard error as it is when they are written."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest

from mlxinfer.server import log


@pytest.fixture
def own_handlers() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("mlxinfer", "uvicorn")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_standard_error_may_be_replaced_and_closed(own_handlers: None, monkeypatch: pytest.MonkeyPatch) -> None:
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
