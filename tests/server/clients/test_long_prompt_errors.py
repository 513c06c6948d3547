"""Errors for prompts that are too long: other projects' clients recognize the wording and raise their own exception."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.http.live_server import LiveServer, openai_client
from support.processes.optional import needs

pytestmark = pytest.mark.long

LONG: Any = [{"role": "user", "content": "x" * 5000}]


@pytest.mark.parametrize("model", ["openai/tiny", "anthropic/tiny"])
@pytest.mark.parametrize("stream", [False, True])
def test_litellm(live: LiveServer, model: str, stream: bool) -> None:
    litellm = needs("litellm")
    base = f"{live.url}/v1" if model.startswith("openai") else live.url
    with pytest.raises(
        litellm.exceptions.ContextWindowExceededError, match=r"maximum context length is 4096 tokens|\d+ tokens > 4095 maximum"
    ):
        litellm.completion(model=model, messages=LONG, base_url=base, api_key="unused", stream=stream, num_retries=0, max_tokens=10)


def test_langchain(live: LiveServer) -> None:
    chat_models = needs("langchain_openai").chat_models.base
    from langchain_core.exceptions import ContextOverflowError

    assert issubclass(chat_models.OpenAIContextOverflowError, ContextOverflowError)
    model = chat_models.ChatOpenAI(model="tiny", base_url=f"{live.url}/v1", api_key="unused", max_retries=0)
    with pytest.raises(ContextOverflowError):
        model.invoke("x" * 5000)
    with pytest.raises(ContextOverflowError):
        list(model.stream("x" * 5000))


def test_claude_codes_pattern(live: LiveServer) -> None:
    anthropic, httpx2 = needs("anthropic"), needs("httpx2")
    client = anthropic.Anthropic(base_url=live.url, api_key="unused", max_retries=0, http_client=httpx2.Client(timeout=60, verify=False))
    with client, pytest.raises(anthropic.BadRequestError) as found:
        client.messages.create(model="tiny", messages=LONG, max_tokens=10)
    tokens, most = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", found.value.body["error"]["message"]).groups()  # type: ignore[index, union-attr]
    assert int(tokens) > 5000 > int(most) == 4095


def test_responses(live: LiveServer) -> None:
    openai = needs("openai")
    with openai_client(live, unix=True) as client, pytest.raises(openai.BadRequestError, match="maximum context length is 4096 tokens"):
        client.responses.create(model="tiny", input="x" * 5000)
