"""Prompts of a server's model: pictures, tools and their results give the tokens of an own copy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.http.live_server import LiveServer, live_server
from support.models.seeing import GOLDEN, cases
from support.models.tiny_directory import tiny_directory

from mlxinfer import LLM
from mlxinfer.cli.remote.connection import ServerAddress
from mlxinfer.cli.remote.remote_model import RemoteModel, served_model
from mlxinfer.engine.async_llm import AsyncLLM

EYES = str(GOLDEN / "smolvlm")
GREEDY = ("--temperature", "0", "--max-tokens", "8", "--ignore-eos")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("models") / "tiny", eos=False, context=4096)


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[LiveServer]:
    with live_server({"tiny": lambda: AsyncLLM(folder), "eyes": lambda: AsyncLLM(EYES, dtype="float32")}) as server:
        yield server


@pytest.fixture
def tiny(live: LiveServer) -> RemoteModel:
    return served_model(ServerAddress(live.url), "tiny")


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "bmp", "gif"])
def test_pictures(call: Any, live: LiveServer, tmp_path: Path, suffix: str) -> None:
    Image.fromarray(cases()["one"].pictures[0]).save(tmp_path / f"cat.{suffix}")
    picture = ("--image", str(tmp_path / f"cat.{suffix}"), *GREEDY)
    own = call("run", EYES, "what is this?", *picture, "--local", "--dtype", "float32")
    served = call("run", "eyes", "what is this?", *picture, "--url", live.url)
    assert (served.code, served.out) == (own.code, own.out)
    blind = call("run", "tiny", "what is this?", *picture, "--url", live.url)
    assert (blind.code, blind.out, blind.err.count("\n")) == (2, "", 2)


def test_pictures_in_a_chat(call: Any, live: LiveServer, tmp_path: Path) -> None:
    Image.fromarray(cases()["one"].pictures[0]).save(tmp_path / "cat.png")
    said = f"/image {tmp_path / 'cat.png'} what is this?\nand now?\n/retry\n"
    own = call("chat", EYES, *GREEDY, "--dtype", "float32", "--local", stdin=said)
    served = call("chat", "eyes", *GREEDY, "--url", live.url, stdin=said)
    assert (served.code, served.out) == (own.code, own.out)


def test_tools_and_their_results(tiny: RemoteModel, folder: Path) -> None:
    def weather(city: str) -> str:
        """Tell the weather."""
        return city

    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "sunny"},
    ]
    with LLM(folder) as llm:
        for count in (1, 3):
            expected = llm.chat_prompt(messages[:count], tools=[weather])
            prompt = tiny.chat_prompt(messages[:count], tools=[weather])
            assert prompt.token_ids == expected.token_ids
        assert tiny.default_params == llm.default_params
