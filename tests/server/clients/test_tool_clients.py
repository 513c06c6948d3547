"""Tools and reasoning through other projects' clients: calls, results and streams against a live server.

The model is random. It calls tools because the request requires a call, and reasons because its template starts that way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from support.engines.scripted import scripted_directory
from support.http.live_server import LiveServer, live_server, openai_client
from support.models.tiny_directory import JSON_CHARACTERS, tiny_directory
from support.processes.optional import needs

from mlxinfer.engine.async_llm import AsyncLLM

if TYPE_CHECKING:
    from openai import OpenAI

openai, anthropic, ollama = needs("openai"), needs("anthropic"), needs("ollama")
httpx2 = needs("httpx2")

HELLO: Any = [{"role": "user", "content": "Hello"}]
CITIES = ["Paris", "Rome"]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": CITIES}},
    "required": ["city"],
    "additionalProperties": False,
}
CLOCK: dict[str, Any] = WEATHER | {"properties": {"zone": {"type": "string", "enum": ["UTC"]}}, "required": ["zone"]}
SCHEMAS = {"weather": WEATHER, "clock": CLOCK}
FUNCTIONS: Any = [{"name": name, "description": f"Tells the {name}.", "parameters": schema} for name, schema in SCHEMAS.items()]
TOOLS: Any = [{"type": "function", "function": function} for function in FUNCTIONS]
FLAT: Any = [{"type": "function", "strict": False, **function} for function in FUNCTIONS]
CLAUDES: Any = [{"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in FUNCTIONS]
SCRIPT = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
THINKING = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking is defined and not enable_thinking %}<think></think>"
    "{% else %}<think>{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("models")
    plain = tiny_directory(folder / "tiny", characters=JSON_CHARACTERS, context=4096)
    thinker = tiny_directory(folder / "thinker", characters=JSON_CHARACTERS, context=4096)
    config = json.loads((thinker / "tokenizer_config.json").read_text())
    (thinker / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": THINKING}))
    scripted = scripted_directory(folder / "scripted", SCRIPT, "It is 21 degrees.")
    loads = {"tiny": plain, "thinker": thinker, "scripted": scripted}
    with live_server({name: partial(AsyncLLM, path) for name, path in loads.items()}) as server:
        yield server


@pytest.fixture
def client(live: LiveServer) -> Iterator[OpenAI]:
    with openai_client(live, unix=True) as client:
        yield client


@pytest.fixture
def claude(live: LiveServer) -> Iterator[Any]:
    http = httpx2.Client(transport=httpx2.HTTPTransport(uds=str(live.path), verify=False), timeout=60)
    with anthropic.Anthropic(base_url=live.url, api_key="unused", max_retries=0, http_client=http) as client:
        yield client


def valid(name: str, arguments: Any) -> bool:
    value = json.loads(arguments) if isinstance(arguments, str) else arguments
    ((key, schema),) = SCHEMAS[name]["properties"].items()
    return list(value) == [key] and value[key] in schema["enum"]


def chat(client: OpenAI, **more: Any) -> Any:
    settings = {"model": "tiny", "messages": HELLO, "tools": TOOLS, "temperature": 1, "max_tokens": 400, "parallel_tool_calls": False}
    return client.chat.completions.create(**{**settings, **more})


# --- OpenAI's chat completions


def test_a_call_that_is_required(client: OpenAI) -> None:
    (choice,) = chat(client, tool_choice="required").choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert valid(call.function.name, call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
    again = chat(client, messages=[*HELLO, choice.message.to_dict(), result], max_tokens=4)
    assert again.usage.prompt_tokens > 40


def test_a_streamed_call_is_that_of_the_whole_answer(client: OpenAI) -> None:
    settings: dict[str, Any] = {"tool_choice": "required", "seed": 5}
    (whole,) = chat(client, **settings).choices[0].message.tool_calls
    chunks = list(chat(client, stream=True, **settings))
    pieces = [piece for chunk in chunks for choice in chunk.choices for piece in choice.delta.tool_calls or ()]
    assert [piece.function.name for piece in pieces] == [whole.function.name] + [None] * (len(pieces) - 1)
    assert [piece.id is not None for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert "".join(piece.function.arguments or "" for piece in pieces) == whole.function.arguments
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == ["tool_calls"]


def test_a_tool_by_name_and_allowed_tools(client: OpenAI) -> None:
    one: Any = {"type": "function", "function": {"name": "clock"}}
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [one]}}
    for choice in (one, allowed):
        (call,) = chat(client, tool_choice=choice).choices[0].message.tool_calls
        assert call.function.name == "clock"


def test_no_tool_is_called_where_none_may_be(client: OpenAI) -> None:
    answer = chat(client, tool_choice="none", max_tokens=16)
    assert answer.choices[0].message.tool_calls is None
    assert answer.usage.prompt_tokens == chat(client, tools=None, parallel_tool_calls=None, max_tokens=16).usage.prompt_tokens


def test_several_answers_call_with_different_ids(client: OpenAI) -> None:
    choices = chat(client, tool_choice="required", n=3).choices
    ids = [call.id for choice in choices for call in choice.message.tool_calls]
    assert len(set(ids)) == len(ids) == 3


def test_functions_of_older_clients(client: OpenAI) -> None:
    settings: dict[str, Any] = {"tools": None, "parallel_tool_calls": None, "functions": FUNCTIONS, "function_call": {"name": "clock"}}
    (choice,) = chat(client, **settings).choices
    assert (choice.finish_reason, choice.message.function_call.name) == ("function_call", "clock")
    result = {"role": "function", "name": "clock", "content": "noon"}
    assert chat(client, **settings, messages=[*HELLO, choice.message.to_dict(), result]).choices[0].message.function_call


def test_a_schema_that_cannot_be_held_is_refused_where_strict_and_any_object_otherwise(client: OpenAI, claude: Any) -> None:
    unheld = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools: Any = [TOOLS[0], {"type": "function", "function": {"name": "f", "parameters": unheld, "strict": True}}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="uniqueItems") as found:
            chat(client, tools=tools, tool_choice="required", stream=stream)
        assert found.value.param == "tools[1]"
    strict = [{"name": "f", "input_schema": unheld, "strict": True}]
    with pytest.raises(anthropic.BadRequestError, match="uniqueItems"):
        claude.messages.create(**claude_settings(tools=strict))
    del tools[1]["function"]["strict"]
    choice: Any = {"type": "function", "function": {"name": "f"}}
    (answer,) = chat(client, tools=tools, tool_choice=choice).choices
    (call,) = answer.message.tool_calls
    assert call.function.arguments.startswith("{")
    assert answer.finish_reason == "length" or isinstance(json.loads(call.function.arguments), dict)


def test_openais_own_parser_of_streams(client: OpenAI) -> None:
    import pydantic

    class City(pydantic.BaseModel):
        city: str = pydantic.Field(max_length=6)

    tool = openai.pydantic_function_tool(City, name="weather")
    with client.chat.completions.stream(model="tiny", messages=HELLO, tools=[tool], tool_choice="required", max_tokens=300) as stream:
        kinds = {event.type for event in stream}
        (call, *_) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert "tool_calls.function.arguments.done" in kinds
    assert isinstance(call.function.parsed_arguments, City)


def test_reasoning(client: OpenAI) -> None:
    settings: dict[str, Any] = {"model": "thinker", "tools": None, "parallel_tool_calls": None, "max_tokens": 40, "seed": 1}
    budget: dict[str, Any] = {**settings, "extra_body": {"thinking_token_budget": 5}}
    answer = chat(client, **budget)
    message = answer.choices[0].message
    assert message.reasoning == message.reasoning_content
    assert 0 < len(message.reasoning) <= 5
    assert message.content
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens <= 5 + len("</think>")
    deltas = [chunk.choices[0].delta for chunk in chat(client, **budget, stream=True)]
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == message.reasoning
    assert "".join(delta.content or "" for delta in deltas) == message.content
    off = chat(client, **settings, reasoning_effort="none").choices[0].message
    assert not hasattr(off, "reasoning")
    called = chat(client, **{**budget, "tools": TOOLS, "tool_choice": "required", "max_tokens": 400}).choices[0]
    assert called.finish_reason == "tool_calls"
    assert called.message.reasoning


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_is_taken_back_under_each_name(client: OpenAI, name: str) -> None:
    def tokens(**more: Any) -> int:
        messages = [*HELLO, {"role": "assistant", "content": "Hi", **more}, *HELLO]
        return int(chat(client, model="thinker", messages=messages, tools=None, parallel_tool_calls=None, max_tokens=1).usage.prompt_tokens)

    assert tokens(**{name: "I greet."}) == tokens() + len("<think>I greet.</think>")


# --- Responses


def respond(client: OpenAI, **more: Any) -> Any:
    settings = {"model": "tiny", "input": "Hello", "tools": FLAT, "max_output_tokens": 400, "parallel_tool_calls": False}
    return client.responses.create(**{**settings, **more})


def test_a_response_that_calls(client: OpenAI) -> None:
    response = respond(client, tool_choice="required", tools=[*FLAT, {"type": "web_search"}])
    (call,) = response.output
    assert call.type == "function_call"
    assert valid(call.name, call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    again = respond(client, input=[*HELLO, *(item.to_dict() for item in response.output), result], max_output_tokens=4)
    assert again.usage.input_tokens > response.usage.input_tokens


def test_a_streamed_response_that_thinks_and_calls(client: OpenAI) -> None:
    settings: dict[str, Any] = {"model": "thinker", "tools": FLAT, "tool_choice": {"type": "function", "name": "weather"}}
    with client.responses.stream(
        input="Hello", max_output_tokens=400, **settings, extra_body={"reasoning": {"effort": "minimal"}}
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    thought, call = final.output
    assert (thought.type, call.type, call.name) == ("reasoning", "function_call", "weather")
    assert thought.content[0].text
    assert valid(call.name, call.arguments)
    assert "response.reasoning_text.delta" in kinds
    assert kinds[-1] == "response.completed"
    assert final.usage.output_tokens_details.reasoning_tokens > 0
    summed = respond(client, **settings, reasoning={"effort": "minimal", "summary": "auto"}).output[0]
    assert summed.summary[0].text
    assert respond(client, model="thinker", tools=[], input=[*HELLO, thought.to_dict(), *HELLO], max_output_tokens=4).output


# --- Anthropic's messages


def claude_settings(**more: Any) -> dict[str, Any]:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    return {"model": "tiny", "messages": HELLO, "max_tokens": 400, "tools": CLAUDES, "tool_choice": choice, **more}


def test_a_message_that_calls(claude: Any) -> None:
    message = claude.messages.create(**claude_settings())
    (block,) = message.content
    assert (message.stop_reason, block.type) == ("tool_use", "tool_use")
    assert valid(block.name, block.input)
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "21"}], "is_error": False}
    turns = [*HELLO, {"role": "assistant", "content": [block.to_dict()]}, {"role": "user", "content": [result]}]
    counted = claude.messages.count_tokens(model="tiny", messages=turns, tools=CLAUDES).input_tokens
    again = claude.messages.create(**claude_settings(messages=turns, tool_choice={"type": "auto"}, max_tokens=4))
    assert again.usage.input_tokens == counted > claude.messages.count_tokens(model="tiny", messages=turns).input_tokens


def test_a_streamed_message_that_thinks_and_calls(claude: Any) -> None:
    thinking = {"type": "enabled", "budget_tokens": 5}
    settings = claude_settings(model="thinker", thinking=thinking, tool_choice={"type": "tool", "name": "clock"})
    with claude.messages.stream(**settings) as stream:
        deltas = [event.delta.type for event in stream if event.type == "content_block_delta"]
        thought, call = stream.get_final_message().content
    assert set(deltas) == {"thinking_delta", "signature_delta", "input_json_delta"}
    assert 0 < len(thought.thinking) <= 5
    assert thought.signature
    assert (call.name, call.input) == ("clock", {"zone": "UTC"})
    turns = [*HELLO, {"role": "assistant", "content": [thought.to_dict(), {"type": "text", "text": "Hi"}]}, *HELLO]
    assert claude.messages.create(model="thinker", messages=turns, max_tokens=4).content[0].type == "text"


# --- Ollama


def test_ollama_thinks(live: LiveServer) -> None:
    options = {"num_predict": 200, "seed": 3, "temperature": 1}
    with ollama.Client(live.url, timeout=60, verify=False) as client:
        assert client.show("thinker").capabilities == ["completion", "tools", "thinking"]
        assert client.show("tiny").capabilities == ["completion", "tools"]
        whole = client.chat(model="thinker", messages=HELLO, think="low", options=options).message
        parts = [part.message for part in client.chat(model="thinker", messages=HELLO, think="low", options=options, stream=True)]
        quiet = client.chat(model="thinker", messages=HELLO, think=False, options={**options, "num_predict": 8}).message
        generated = client.generate(model="thinker", prompt="Hello", think=True, options={**options, "num_predict": 8})
        with pytest.raises(ollama.ResponseError, match="does not support thinking"):
            client.chat(model="tiny", messages=HELLO, think=True)
    assert whole.thinking
    assert len(whole.thinking) <= 0.2 * 200
    assert "".join(part.thinking or "" for part in parts) == whole.thinking
    assert "".join(part.content or "" for part in parts) == whole.content
    assert not quiet.thinking
    assert (generated.response, bool(generated.thinking)) == ("", True)


def test_ollama_takes_calls_and_results(live: LiveServer) -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_name": "weather", "content": "21"}]
    options = {"num_predict": 2}
    with ollama.Client(live.url, timeout=60, verify=False) as client:
        plain = client.chat(model="tiny", messages=HELLO, options=options).prompt_eval_count
        told = client.chat(model="tiny", messages=HELLO, tools=TOOLS, options=options).prompt_eval_count
        more = client.chat(model="tiny", messages=messages, tools=TOOLS, options=options).prompt_eval_count
        with pytest.raises(ollama.ResponseError, match=r"messages\[1\]"):
            client.chat(model="tiny", messages=[HELLO[0], messages[2]])
    assert plain < told < more


def test_ollama_calls_and_goes_on_with_the_result(live: LiveServer) -> None:
    with ollama.Client(live.url, timeout=60, verify=False) as client:
        answer = client.chat(model="scripted", messages=HELLO, tools=TOOLS).message
        parts = list(client.chat(model="scripted", messages=HELLO, tools=TOOLS, stream=True))
        (call,) = answer.tool_calls or ()
        (streamed,) = [call for part in parts for call in part.message.tool_calls or ()]
        result = {"role": "tool", "tool_name": call.function.name, "content": "21"}
        last = client.chat(model="scripted", messages=[*HELLO, answer, result], tools=TOOLS).message
        unoffered = client.chat(model="scripted", messages=HELLO).message
    assert (answer.content, call.function.name, call.function.arguments) == ("", "weather", {"city": "Rome"})
    assert streamed == call
    assert (last.content, last.tool_calls) == ("It is 21 degrees.", None)
    assert (unoffered.content, unoffered.tool_calls) == (SCRIPT, None)


# --- libraries on top of these clients


@pytest.mark.long
def test_langchain(live: LiveServer) -> None:
    needs("langchain_openai")
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(live.path), verify=False)) as http:
        model = ChatOpenAI(model="tiny", base_url=f"{live.url}/v1", api_key="unused", max_tokens=400, http_client=http, max_retries=0)  # type: ignore[arg-type, call-arg]
        tooled = model.bind_tools(TOOLS, tool_choice="required", parallel_tool_calls=False)
        answer: Any = tooled.invoke("Hello")
        (call,) = answer.tool_calls
        assert valid(call["name"], call["args"])
        assert tooled.invoke([HumanMessage("Hello"), answer, ToolMessage("21", tool_call_id=call["id"])]).tool_calls
        whole: Any = None
        for chunk in tooled.stream("Hello"):
            whole = chunk if whole is None else whole + chunk
        assert [valid(call["name"], call["args"]) for call in whole.tool_calls] == [True]
        city = {"title": "city", "description": "A city.", **WEATHER}
        assert valid("weather", model.with_structured_output(city, method="function_calling").invoke("Hello"))
        through: Any = model.model_copy(update={"use_responses_api": True}).bind_tools(TOOLS, tool_choice="required")
        assert through.invoke("Hello").tool_calls


@pytest.mark.long
def test_litellm(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = needs("litellm")
    pytest.importorskip("mcp", reason="mcp is not installed, without which LiteLLM knows no tools (pip install '.[agents]')")
    litellm.telemetry = False
    settings: dict[str, Any] = {
        "model": "openai/tiny",
        "api_base": f"{live.url}/v1",
        "api_key": "unused",
        "messages": HELLO,
        "max_tokens": 400,
    }
    settings |= {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = litellm.completion(**settings).choices[0].message.tool_calls
    assert valid(call.function.name, call.function.arguments)
    chunks = list(litellm.completion(**settings, stream=True))
    (choice,) = litellm.stream_chunk_builder(chunks, messages=HELLO).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert valid(call.function.name, call.function.arguments)


# --- a real model, whose prompt describes the tools


@pytest.fixture(scope="module")
def real() -> Iterator[LiveServer]:
    with live_server({"smollm2": lambda: AsyncLLM("smollm2")}) as server:
        yield server


@pytest.mark.model
def test_a_real_model_calls_what_it_is_asked_for(real: LiveServer) -> None:
    question: Any = [{"role": "user", "content": "How is the weather in Rome?"}]
    with openai_client(real, unix=True) as client:
        settings: dict[str, Any] = {"model": "smollm2", "messages": question, "temperature": 0, "tool_choice": "required"}
        (call,) = chat(client, **settings).choices[0].message.tool_calls
        pieces = [piece for chunk in chat(client, stream=True, **settings) for piece in chunk.choices[0].delta.tool_calls or ()]
        (item,) = respond(client, model="smollm2", input=question, tool_choice="required", temperature=0).output
    assert valid(call.function.name, call.function.arguments)
    assert "".join(piece.function.arguments or "" for piece in pieces) == call.function.arguments
    assert (item.name, item.arguments) == (call.function.name, call.function.arguments)
    http = httpx2.Client(transport=httpx2.HTTPTransport(uds=str(real.path), verify=False), timeout=60)
    with anthropic.Anthropic(base_url=real.url, api_key="unused", max_retries=0, http_client=http) as claude:
        settings = claude_settings(model="smollm2", messages=question, extra_body={"temperature": 0})
        (block,) = claude.messages.create(**settings).content
        with claude.messages.stream(**settings) as stream:
            streamed = stream.get_final_message().content
    assert (block.name, block.input) == (call.function.name, json.loads(call.function.arguments))
    assert [one.input for one in streamed] == [block.input]
