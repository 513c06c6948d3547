"""Calls by a real model without a tool format: the tools are described to it, and every call fits its schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from support.schemas.function_sets import FOLDER, MOST, function_sets

from mlxinfer import LLM, SamplingParams
from mlxinfer.tools import Tools, offered

jsonschema = pytest.importorskip("jsonschema")
pytestmark = pytest.mark.model
AT_ONCE = 15
"""Function sets that are asked for in one batch."""


@pytest.fixture(scope="module")
def smollm2() -> Iterator[LLM]:
    with LLM("smollm2", max_context=8192) as llm:
        yield llm


def fits(completion: Any, tools: Tools) -> bool:
    """True if all calls of a finished answer name an offered tool and validate."""
    for call in completion.tool_calls:
        jsonschema.validate(json.loads(call.arguments), tools[call.name].parameters.schema)
    return bool(completion.tool_calls)


def get_weather(city: str, days: int = 1) -> str:
    """Tell the weather of a city.

    Args:
        city: The city's name.
        days: How many days ahead.
    """
    return f"{city} {days}"


def play(song: str, loud: bool = False) -> str:
    """Play a song."""
    return f"{song} {loud}"


def test_required_calls_fit(smollm2: LLM) -> None:
    tools = offered([get_weather, play])
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    prompt = smollm2.chat_prompt(messages, tools=list(tools.values()), tool_choice="required", parallel_tool_calls=False)
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=200) for seed in range(1, 2)]
    found = smollm2.generate([prompt], params)
    assert all(answer.finish_reason == "stop" and fits(answer, tools) and not answer.text for answer in found)
    named = smollm2.chat(messages, SamplingParams(temperature=0, max_tokens=80), tools=[get_weather, play], tool_choice="get_weather")
    assert named.tool_calls[0].name == "get_weather"
    assert "Paris" in named.tool_calls[0].arguments
    assert tools["get_weather"].run(named.tool_calls[0].arguments)


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER, reason="MLXINFER_TEST_BFCL names no folder of function sets")
@pytest.mark.parametrize("first", range(0, MOST, AT_ONCE))
def test_required_calls_fit_hundreds_of_function_sets(smollm2: LLM, first: int, capsys: pytest.CaptureFixture[str]) -> None:
    cases = list(islice(function_sets(), first, first + AT_ONCE))
    assert len(cases) == AT_ONCE
    ask = {"tool_choice": "required", "parallel_tool_calls": False}
    prompts = [smollm2.chat_prompt([{"role": "user", "content": question}], tools=[*tools.values()], **ask) for question, tools in cases]
    params = [SamplingParams(temperature=1.0, seed=first + number, max_tokens=160) for number in range(AT_ONCE)]
    found = smollm2.generate(prompts, params)
    assert {answer.finish_reason for answer in found} <= {"stop", "length"}
    ended = [(answer, tools) for answer, (_, tools) in zip(found, cases, strict=True) if answer.finish_reason == "stop"]
    rambled = [call.arguments[-60:] for answer in found if answer.finish_reason == "length" for call in answer.tool_calls[-1:]]
    with capsys.disabled():
        print(f"{first}: ended {len(ended)}, ran into max_tokens {len(found) - len(ended)}:", rambled)  # noqa: T201
    assert all(fits(answer, tools) and not answer.text for answer, tools in ended)
    assert len(ended) >= AT_ONCE // 2
