from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.http.live_server import LiveServer, live_server, openai_client
from support.models.tiny_directory import tiny_directory

from mlxinfer.engine.async_llm import AsyncLLM

if TYPE_CHECKING:
    from openai import OpenAI


@pytest.fixture(autouse=True)
def _logs_go_where_they_went() -> Iterator[None]:
    """Restore the loggers: a test that starts a whole server in this process also changes its logging."""
    loggers = [logging.getLogger(name) for name in ("mlxinfer", "uvicorn")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without an end token: its answers have the maximum length."""
    return tiny_directory(tmp_path_factory.mktemp("models") / "tiny", eos=False, context=4096, rounded=True)


@pytest.fixture(scope="package")
def live(tiny_path: Path) -> Iterator[LiveServer]:
    """The tiny model as `tiny`, on a Unix socket and on TCP."""
    with live_server({"tiny": lambda: AsyncLLM(tiny_path)}) as server:
        yield server


@pytest.fixture(params=["unix", "tcp"])
def client(request: pytest.FixtureRequest, live: LiveServer) -> Iterator[OpenAI]:
    with openai_client(live, unix=request.param == "unix") as client:
        yield client


@pytest.fixture
def unix_client(live: LiveServer) -> Iterator[OpenAI]:
    with openai_client(live, unix=True) as client:
        yield client
