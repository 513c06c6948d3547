"""Agent libraries and libraries for typed answers on top of OpenAI's client, each with a tool call or a schema against a live server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import pytest
from support.http.live_server import LiveServer, live_server
from support.models.tiny_directory import JSON_CHARACTERS, tiny_directory
from support.processes.optional import needs

from mlxinfer.engine.async_llm import AsyncLLM

if TYPE_CHECKING:
    from openai import OpenAI

openai, pydantic = needs("openai"), needs("pydantic")


def installed(name: str) -> Any:
    """The module, or a skip."""
    return pytest.importorskip(name, reason=f"{name} is not installed (pip install '.[agents]')")


pytestmark = pytest.mark.long


class City(pydantic.BaseModel):  # type: ignore[misc, name-defined]
    """A city."""

    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=6)
    capital: bool


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path = tiny_directory(tmp_path_factory.mktemp("models") / "tiny", characters=JSON_CHARACTERS, context=8192)
    with live_server({"tiny": lambda: AsyncLLM(path)}) as server:
        yield server


def test_instructor(unix_client: OpenAI) -> None:
    instructor = installed("instructor")
    messages: Any = [{"role": "user", "content": "Which city?"}]
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        typed = instructor.from_openai(unix_client, mode=mode)
        settings: Any = {"model": "tiny", "messages": messages, "max_tokens": 400, "max_retries": 0}
        assert isinstance(typed.chat.completions.create(response_model=City, **settings), City)
        *_, last = typed.chat.completions.create_partial(response_model=City, **settings)
        assert isinstance(last.capital, bool)


def test_pydantic_ai(live: LiveServer) -> None:
    pydantic_ai = installed("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{live.url}/v1", api_key="unused")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        agent: Any = pydantic_ai.Agent(kind("tiny", provider=provider), output_type=City, model_settings={"max_tokens": 400})
        result = agent.run_sync("Which city?")
        assert isinstance(result.output, City)


def test_openai_agents(live: LiveServer) -> None:
    agents = installed("agents")
    called: list[str] = []

    @agents.function_tool  # type: ignore[untyped-decorator]
    def remember(colour: Literal["red", "blue"]) -> str:
        """Remembers a colour."""
        called.append(colour)
        return "done"

    async def run(kind: Any) -> Any:
        client = openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0)
        model = kind(model="tiny", openai_client=client)
        settings = agents.ModelSettings(tool_choice="remember", max_tokens=100)
        more = {"tools": [remember], "tool_use_behavior": "stop_on_first_tool"}  # the next answer of a random model would not end
        return await agents.Runner.run(agents.Agent(name="a", model=model, model_settings=settings, **more), "Remember me.")

    agents.set_tracing_disabled(True)
    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        called.clear()
        result = asyncio.run(run(kind))
        assert len(called) == 1
        assert called[0] in ("red", "blue")
        assert result.final_output == "done"


def test_outlines(unix_client: OpenAI) -> None:
    outlines = installed("outlines")
    model = outlines.from_vllm(unix_client, "tiny")
    assert isinstance(City.model_validate_json(model("Which city?", City, max_tokens=400)), City)
