from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.engines.scripted import scripted_directory
from support.http.chromium import ANSWER, CALL, Chat, OpenPage, chromium
from support.http.live_server import LiveServer, live_server, openai_client
from support.models.tiny_directory import tiny_directory

from mlxinfer.engine.async_llm import AsyncLLM

if TYPE_CHECKING:
    from openai import OpenAI


@pytest.fixture(autouse=True)
def _logs_go_where_they_went() -> Iterator[None]:
    """A test that starts a whole server in this process also starts its log."""
    loggers = [logging.getLogger(name) for name in ("mlxinfer", "uvicorn")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without an end token, so that answers run to their length."""
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


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def page_models(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], AsyncLLM]]:
    folder = tmp_path_factory.mktemp("models")
    paths = {
        "scripted": scripted_directory(folder / "scripted", ANSWER),
        "endless": tiny_directory(folder / "endless", eos=False, context=1 << 18, rounded=True),
        "short": tiny_directory(folder / "short", eos=False, context=512, rounded=True),
        "caller": scripted_directory(folder / "caller", CALL, "It is 21 degrees."),
    }
    return {name: partial(AsyncLLM, path) for name, path in paths.items()}


@pytest.fixture(scope="module")
def page_server(page_models: dict[str, Callable[[], AsyncLLM]]) -> Iterator[LiveServer]:
    with live_server(page_models) as live:
        yield live


@pytest.fixture
def opened(browser: Any) -> Iterator[OpenPage]:
    """Opens pages, and closes them at the end; none may have logged an error."""
    pages: list[Chat] = []

    def open_page(server: LiveServer, **options: Any) -> Chat:
        pages.append(Chat(browser, f"{server.url}/", **options))
        return pages[-1]

    yield open_page
    for each in pages:
        each.context.close()
        assert each.errors == []


@pytest.fixture
def chat(opened: OpenPage, page_server: LiveServer) -> Chat:
    """The page of `page_server`."""
    return opened(page_server)
