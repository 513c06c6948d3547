"""Continued answers: `continue_final_message` of `/v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.http.kept_models import request
from support.http.live_server import LiveServer, live_server
from support.models.tiny_directory import JSON_CHARACTERS, tiny_directory

from mlxinfer.engine.async_llm import AsyncLLM
from mlxinfer.engine.text.chat_prompt import ChatPrompt, continued
from mlxinfer.output_format import OutputFormat, ReasoningFormat

HELLO = [{"role": "user", "content": "Hello"}]
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder: Path = tmp_path_factory.mktemp("models")
    path = tiny_directory(folder / "tiny", eos=False, characters=JSON_CHARACTERS, context=4096, rounded=True)
    with live_server({"tiny": lambda: AsyncLLM(path)}) as server:
        yield server


def ask(live: LiveServer, **body: Any) -> tuple[int, dict[str, Any]]:
    raw = request("/v1/chat/completions", json.dumps({**GREEDY, **body}).encode(), "Content-Type: application/json")
    status, _, answer = live.exchange(raw, unix=True)
    return status, json.loads(answer)


def said(live: LiveServer, **body: Any) -> str:
    status, answer = ask(live, **body)
    assert status == 200, answer
    return str(answer["choices"][0]["message"]["content"])


def test_the_rest_is_what_would_have_followed(live: LiveServer) -> None:
    whole = said(live, messages=HELLO)
    assert len(whole) > 12
    begun = [*HELLO, {"role": "assistant", "content": whole[:10]}]
    for more in ({}, {"add_generation_prompt": False}):
        assert whole[10:].startswith(said(live, messages=begun, continue_final_message=True, max_tokens=8, **more))
    assert said(live, messages=begun, max_tokens=8) != said(live, messages=begun, continue_final_message=True, max_tokens=8)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": HELLO, "continue_final_message": True}, "continue_final_message"),
        ({"messages": [*HELLO, {"role": "assistant", "content": ""}], "continue_final_message": True}, "continue_final_message"),
        (
            {
                "messages": [*HELLO, {"role": "assistant", "content": "x"}],
                "continue_final_message": True,
                "response_format": {"type": "json_object"},
            },
            "continue_final_message",
        ),
        ({"messages": HELLO, "add_generation_prompt": False}, "add_generation_prompt"),
    ],
)
def test_what_cannot_be_continued_is_refused(live: LiveServer, body: dict[str, Any], param: str) -> None:
    status, answer = ask(live, **body)
    assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("begun", "content", "reasoning", "text", "opened"),
    [
        ("[assistant]", "so", "", "so", ""),
        ("[assistant]", "so", "hm", "<think>hm</think>so", ""),
        ("[assistant]", "", "hm", "<think>hm", "<think>"),
        ("[assistant]<think>\n", "", "hm", "hm", "<think>"),
        ("[assistant]<think>\n", "so", "hm", "hm</think>so", ""),
        ("[assistant]<think>\n", "so", "", "</think>so", ""),
    ],
)
def test_reasoning_goes_on_as_reasoning(begun: str, content: str, reasoning: str, text: str, opened: str) -> None:
    tokenizer: Any = SimpleNamespace(encode=lambda text, add_special_tokens: [ord(letter) for letter in text])
    prompt = ChatPrompt([1], OutputFormat(ReasoningFormat("<think>", "</think>"), None, "table"), begun=begun)
    found = continued(prompt, tokenizer, content, reasoning)
    assert "".join(map(chr, found.token_ids[1:])) == text
    assert found.begun == opened
