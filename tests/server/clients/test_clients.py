"""Other projects' clients against a live server, over the Unix socket if the client supports it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.http.live_server import LiveServer
from support.processes.optional import needs

if TYPE_CHECKING:
    from openai import OpenAI

httpx2 = needs("httpx2")
openai = needs("openai")

MESSAGES: Any = [{"role": "user", "content": "Hello"}]
END = "---end---\n"
LLM_COMMANDS = f"""
import json, sys
from llm.cli import cli
for command in json.loads(sys.argv[1]):
    cli.main(command, standalone_mode=False)
    print({END!r}, end="")
"""
"""Commands of `llm` in one process, because the process takes seconds to start."""


@pytest.fixture
def expected(unix_client: OpenAI) -> str:
    answer = unix_client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=12)
    assert answer.choices[0].message.content
    return answer.choices[0].message.content


async def _many(live: LiveServer, count: int) -> list[str]:
    transport = httpx2.AsyncHTTPTransport(uds=str(live.path), verify=False)
    async with openai.AsyncOpenAI(
        base_url=f"{live.url}/v1", api_key="unused", http_client=httpx2.AsyncClient(transport=transport)
    ) as client:

        async def one(number: int) -> str:
            messages: Any = [{"role": "user", "content": f"Number {number}"}]
            settings: Any = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 12}
            if number % 2:
                return (await client.chat.completions.create(**settings)).choices[0].message.content or ""
            pieces = [chunk.choices[0].delta.content or "" async for chunk in await client.chat.completions.create(**settings, stream=True)]
            return "".join(pieces)

        return await asyncio.gather(*(one(i) for i in range(count)))


def test_openai_with_many_requests_at_once(live: LiveServer, unix_client: OpenAI) -> None:
    together = asyncio.run(_many(live, 24))
    for number in (0, 1, 22, 23):
        messages: Any = [{"role": "user", "content": f"Number {number}"}]
        alone = unix_client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=12)
        assert alone.choices[0].message.content == together[number]


@pytest.mark.long
def test_langchain(live: LiveServer, expected: str) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI

    with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(live.path), verify=False)) as http:
        settings: Any = {"model": "tiny", "base_url": f"{live.url}/v1", "api_key": "unused", "temperature": 0, "max_tokens": 12}
        chat = ChatOpenAI(**settings, http_client=http, max_retries=0)
        answer = chat.invoke([HumanMessage("Hello")])
        assert answer.content == expected
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["output_tokens"] == 12
        assert answer.response_metadata["finish_reason"] == "length"
        assert "".join(str(chunk.content) for chunk in chat.stream("Hello")) == expected
        assert len(chat.bind(logprobs=True).invoke("Hello").response_metadata["logprobs"]["content"]) == 12
        assert str(chat.bind(stop=[expected[3]]).invoke("Hello").content) == expected[: expected.index(expected[3])]
        responses = ChatOpenAI(**settings, http_client=http, use_responses_api=True)
        assert responses.invoke("Hello").text == expected
        assert "".join(chunk.text for chunk in responses.stream("Hello")) == expected
        with pytest.raises(openai.NotFoundError):
            ChatOpenAI(**{**settings, "model": "other"}, http_client=http).invoke("Hello")


@pytest.mark.long
def test_litellm(live: LiveServer, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = needs("litellm")
    litellm.telemetry = False
    settings = {"model": "openai/tiny", "api_base": f"{live.url}/v1", "api_key": "unused", "temperature": 0, "max_tokens": 12}
    answer = litellm.completion(**settings, messages=MESSAGES)
    assert answer.choices[0].message.content == expected
    assert answer.usage.completion_tokens == 12
    chunks = list(litellm.completion(**settings, messages=MESSAGES, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert [chunk.usage.completion_tokens for chunk in chunks if getattr(chunk, "usage", None)] == [12]
    assert len(litellm.completion(**settings, messages=MESSAGES, n=2).choices) == 2
    text = litellm.text_completion(**{**settings, "model": "text-completion-openai/tiny"}, prompt="Hello")
    assert text.choices[0].text
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**settings, "model": "openai/other"}, messages=MESSAGES)
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**settings, messages=MESSAGES, response_format={"type": "json_object"})


@pytest.mark.long
def test_llm(live: LiveServer, tmp_path: Path, expected: str) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(f"- model_id: here\n  model_name: tiny\n  api_base: {live.url}/v1\n")
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": "", "OPENAI_API_KEY": "unused"}
    prompt = ["prompt", "-m", "here", "-o", "temperature", "0", "-o", "max_tokens", "12"]
    commands = [[*prompt, "Hello"], [*prompt, "--no-stream", "Hello"], ["logs", "--json"]]
    done = subprocess.run(
        [sys.executable, "-c", LLM_COMMANDS, json.dumps(commands)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    *answers, logs = done.stdout.split(END)[:-1]
    assert answers == [f"{expected}\n"] * 2
    assert [entry["output_tokens"] for entry in json.loads(logs)] == [12, 12]
