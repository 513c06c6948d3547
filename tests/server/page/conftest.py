from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from support.engines.scripted import scripted_directory
from support.http.chromium import ANSWER, CALL, Chat, OpenPage, chromium
from support.http.live_server import LiveServer, live_server
from support.models.tiny_directory import tiny_directory

from mlxinfer.engine.async_llm import AsyncLLM


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
    """Opens pages. At the end the pages are closed, and none may have logged an error."""
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
