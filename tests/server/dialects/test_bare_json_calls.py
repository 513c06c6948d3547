"""Calls that a model writes as plain JSON, through every dialect's client and through Python, with `tool_choice` auto, streamed and
complete."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.engines.scripted import scripted_directory
from support.http.live_server import LiveServer, live_server, openai_client
from support.processes.optional import needs

from mlxinfer import LLM
from mlxinfer.engine.async_llm import AsyncLLM

openai, anthropic, ollama = needs("openai"), needs("anthropic"), needs("ollama")

HELLO: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION: dict[str, Any] = {"name": "get_weather", "description": "Tells the weather.", "parameters": SCHEMA}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
ROME, PARIS = ('{"name": "get_weather", "arguments": {"city": "' + city + '"}}' for city in ("Rome", "Paris"))
SAID = {
    "bare": PARIS,
    "fenced": f"```json\n{PARIS}\n```",
    "two": f"{PARIS}\n{ROME}",
    "listed": f"[{PARIS}, {ROME}]",
    "unknown": PARIS.replace("get_weather", "get_time"),
    "prose": f"Write {PARIS} to call it.",
}
CITIES = {"bare": ["Paris"], "fenced": ["Paris"], "two": ["Paris", "Rome"], "listed": ["Paris", "Rome"], "unknown": [], "prose": []}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: scripted_directory(folder / name, said) for name, said in SAID.items()}


@pytest.fixture(scope="module")
def live(paths: dict[str, Path]) -> Iterator[LiveServer]:
    with live_server({name: partial(AsyncLLM, path, memory_gb=1) for name, path in paths.items()}) as server:
        yield server


def expect(name: str, cities: list[str], text: str | None) -> None:
    assert cities == CITIES[name]
    assert (text or "") == ("" if cities else SAID[name])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", SAID)
def test_chat_completions(live: LiveServer, name: str, stream: bool) -> None:
    with openai_client(live, unix=True) as client:
        answer = client.chat.completions.create(model=name, messages=HELLO, tools=TOOLS, stream=stream)
        if not stream:
            (choice,) = answer.choices
            calls = [json.loads(call.function.arguments)["city"] for call in choice.message.tool_calls or ()]
            reason, text = choice.finish_reason, choice.message.content
        else:
            choices = [choice for chunk in answer for choice in chunk.choices]
            pieces = [piece for choice in choices for piece in choice.delta.tool_calls or ()]
            by_call = ["".join(p.function.arguments for p in pieces if p.index == i) for i in sorted({piece.index for piece in pieces})]
            calls, reason = [json.loads(text)["city"] for text in by_call], choices[-1].finish_reason
            text = "".join(choice.delta.content or "" for choice in choices)
    expect(name, calls, text)
    assert reason == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize("name", SAID)
def test_responses(live: LiveServer, name: str) -> None:
    flat: Any = [{"type": "function", "strict": False, **FUNCTION}]
    with openai_client(live, unix=True) as client:
        answer = client.responses.create(model=name, input="What is the weather in Paris?", tools=flat)
    calls = [json.loads(item.arguments)["city"] for item in answer.output if item.type == "function_call"]
    expect(name, calls, answer.output_text)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", SAID)
def test_messages(live: LiveServer, name: str, stream: bool) -> None:
    tools = [{"name": "get_weather", "description": "Tells the weather.", "input_schema": SCHEMA}]
    asked: Any = {"model": name, "messages": HELLO, "tools": tools, "max_tokens": 99}
    with anthropic.Anthropic(base_url=live.url, api_key="unused", max_retries=0) as client:
        if stream:
            with client.messages.stream(**asked) as events:
                answer = events.get_final_message()
        else:
            answer = client.messages.create(**asked)
    calls = [block.input["city"] for block in answer.content if block.type == "tool_use"]
    expect(name, calls, "".join(block.text for block in answer.content if block.type == "text"))
    assert answer.stop_reason == ("tool_use" if calls else "end_turn")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", SAID)
def test_ollama(live: LiveServer, name: str, stream: bool) -> None:
    answer = ollama.Client(host=live.url).chat(model=name, messages=HELLO, tools=TOOLS, stream=stream)
    parts = [part.message for part in answer] if stream else [answer.message]
    calls = [call.function.arguments["city"] for part in parts for call in part.tool_calls or ()]
    expect(name, calls, "".join(part.content or "" for part in parts))


@pytest.mark.parametrize("name", SAID)
def test_python(paths: dict[str, Path], name: str) -> None:
    with LLM(paths[name], memory_gb=1) as llm:
        answer = llm.chat(HELLO, tools=TOOLS)
        expect(name, [json.loads(call.arguments)["city"] for call in answer.tool_calls], answer.text)
        streamed = [piece for chunk in llm.stream_chat(HELLO, tools=TOOLS) for piece in chunk.tool_calls]
        assert "".join(piece.arguments for piece in streamed) == "".join(call.arguments for call in answer.tool_calls)
        forced = llm.chat(HELLO, tools=TOOLS, tool_choice="none")
        assert (forced.tool_calls, forced.text) == ((), SAID[name])
