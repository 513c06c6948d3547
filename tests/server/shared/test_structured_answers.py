"""Answers constrained by a schema in every dialect: the real clients against a live server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from support.http.live_server import LiveServer, live_server
from support.models.tiny_directory import JSON_CHARACTERS, tiny_directory
from support.processes.optional import needs

from mlxinfer.engine.async_llm import AsyncLLM
from mlxinfer.server.shared.structure import StructuredOutputs
from mlxinfer.structure import Schema

if TYPE_CHECKING:
    from openai import OpenAI

openai, anthropic, ollama = needs("openai"), needs("anthropic"), needs("ollama")
httpx, httpx2 = needs("httpx"), needs("httpx2")

MESSAGES: Any = [{"role": "user", "content": "Hello"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
UNHELD: dict[str, Any] = {"properties": {"a": {"type": "array", "uniqueItems": True}}}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path = tiny_directory(tmp_path_factory.mktemp("models") / "tiny", characters=JSON_CHARACTERS, context=4096)
    with live_server({"tiny": lambda: AsyncLLM(path)}) as server:
        yield server


def fits(text: str | None) -> bool:
    value = json.loads(text or "")
    return list(value) == ["city", "size"] and value["city"] in ("Paris", "Rome") and 0 <= value["size"] <= 99


def chat(client: OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, "temperature": 1, "max_tokens": 200, **more})


def test_openai_chat(unix_client: OpenAI) -> None:
    answer = chat(unix_client, response_format=NAMED, n=3)
    assert all(fits(choice.message.content) and choice.finish_reason == "stop" for choice in answer.choices)
    pieces = [choice.delta.content or "" for chunk in chat(unix_client, response_format=NAMED, stream=True) for choice in chunk.choices]
    assert fits("".join(pieces))


def test_openai_parses_a_pydantic_model(unix_client: OpenAI) -> None:
    import pydantic

    class City(pydantic.BaseModel):
        city: str = pydantic.Field(max_length=8)
        capital: bool

    answer = unix_client.chat.completions.parse(model="tiny", messages=MESSAGES, max_tokens=300, response_format=City)
    assert isinstance(answer.choices[0].message.parsed, City)


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
    ],
)
def test_other_engines_fields(unix_client: OpenAI, fields: Any) -> None:
    assert fits(chat(unix_client, extra_body=fields).choices[0].message.content)
    completion = unix_client.completions.create(model="tiny", prompt="Hello", max_tokens=200, temperature=1, extra_body=fields)
    assert fits(completion.choices[0].text)


def test_objects_without_other_properties(unix_client: OpenAI) -> None:
    few = {"type": "object", "properties": {"a": {"type": "boolean"}}}
    fields = {"structured_outputs": {"json": few, "disable_additional_properties": True}}
    assert json.loads(chat(unix_client, extra_body=fields).choices[0].message.content) in ({}, {"a": True}, {"a": False})
    for given in (few, json.dumps(few)):
        held = StructuredOutputs(json=given, disable_additional_properties=True).structure("structured_outputs")
        assert held == Schema({**few, "additionalProperties": False})
    assert StructuredOutputs(json=few).structure("structured_outputs") == Schema(few)


@pytest.mark.parametrize(
    ("fields", "answers"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no")),
        ({"guided_choice": ["yes", "no"]}, ("yes", "no")),
        ({"structured_outputs": {"regex": "[ab]-1"}}, ("a-1", "b-1")),
        ({"guided_regex": "[ab]-1"}, ("a-1", "b-1")),
        ({"structured_outputs": {"grammar": 'start: "left" | "right"'}}, ("left", "right")),
        ({"guided_grammar": 'root ::= "left" | "right"'}, ("left", "right")),
    ],
)
def test_choices_expressions_and_grammars(unix_client: OpenAI, fields: Any, answers: tuple[str, ...]) -> None:
    assert chat(unix_client, extra_body=fields).choices[0].message.content in answers


def test_any_json_object(unix_client: OpenAI) -> None:
    content = chat(unix_client, response_format={"type": "json_object"}, max_tokens=600, seed=3).choices[0].message.content
    assert content.startswith("{")


def test_responses(unix_client: OpenAI) -> None:
    form = {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}}
    response = unix_client.responses.create(model="tiny", input="Hello", max_output_tokens=200, text=form)  # type: ignore[arg-type]
    assert fits(response.output_text)
    assert response.text is not None
    assert response.text.to_dict() == form


def test_anthropic(live: LiveServer) -> None:
    http = httpx2.Client(transport=httpx2.HTTPTransport(uds=str(live.path), verify=False), timeout=60)
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    with anthropic.Anthropic(base_url=live.url, api_key="unused", max_retries=0, http_client=http) as client:
        message = client.messages.create(model="tiny", messages=MESSAGES, max_tokens=200, extra_body={"output_config": form})
    assert fits(message.content[0].text)


@pytest.mark.long
@pytest.mark.parametrize("form", [SCHEMA, "json"])
def test_ollama(live: LiveServer, form: Any) -> None:
    client = ollama.Client(live.url, transport=httpx.HTTPTransport(uds=str(live.path), verify=False), timeout=60)
    options = {"num_predict": 400, "temperature": 1, "seed": 3}
    for text in (
        client.chat(model="tiny", messages=MESSAGES, format=form, options=options).message.content,
        client.generate(model="tiny", prompt="Hello", format=form, options=options).response,
    ):
        assert fits(text) if isinstance(form, dict) else text.startswith("{")


@pytest.mark.long
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": UNHELD}}}, "response_format", "properties.a"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "a schema is needed"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "only text or json_object or json_schema"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "at once"),
        ({"guided_json": "{", "response_format": NAMED}, "guided_json", "not JSON"),
        ({"guided_choice": ["a"], "response_format": NAMED}, "response_format", "at once"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not supported yet"),
        ({"guided_choice": [""]}, "guided_choice", "non-empty"),
        ({"response_format": NAMED, "ignore_eos": True}, "ignore_eos", "cannot be combined"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_held_is_a_400_that_names_the_field(unix_client: OpenAI, stream: bool, fields: Any, param: str, words: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        list(chat(unix_client, extra_body=fields, stream=stream))
    assert error.value.body["param"] == param
    assert words in error.value.body["message"]
    assert "structure" not in error.value.body["message"].replace("structured_outputs", "").replace("with structure: the structure", "")
