from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.live_server import LiveServer, live_server
from support.tiny_directory import tiny_directory

from mlxinfer.engine.async_llm import AsyncLLM


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without an end token, so that answers run to their length."""
    return tiny_directory(tmp_path_factory.mktemp("models") / "tiny", eos=False)


@pytest.fixture(scope="module")
def live(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The tiny model as `tiny`, on a Unix socket and on TCP."""
    with live_server({"tiny": lambda: AsyncLLM(tiny_path)}, tmp_path_factory.mktemp("run") / "api.sock") as server:
        yield server
