"""Tools as callers give them: functions, dicts, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import date
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, Union

import pytest

from mlxinfer import Tool, ToolCall
from mlxinfer.errors import PromptError, ToolError
from mlxinfer.tools import ToolChoice, chosen, offered


class Unit(Enum):
    CELSIUS = "c"
    FAHRENHEIT = "f"


@dataclass
class Place:
    city: str
    country: str = "FR"


class Note(TypedDict, total=False):
    text: str


def everything(
    place: Place,
    count: int,
    share: float,
    unit: Unit = Unit.CELSIUS,
    mode: Literal["fast", "slow"] = "fast",
    names: list[str] | None = None,
    table: dict[str, int] | None = None,
    either: Union[int, str] = 1,
    pair: tuple[int, str] = (1, "a"),
    notes: list[Note] = [],  # noqa: B006
    anything: Any = None,
    day: date = date(2024, 1, 1),
    path: Annotated[Path, "Where it lies."] = Path("."),
    sure: bool = True,
) -> str:
    """Do everything at once,
    and more.

    Args:
        place: Where, by its
            name.
        count (int): How many.
        share: Of 1.

    Returns:
        What was done.
    """
    return repr((place, count, share, unit, mode, names, table, either, pair, notes, anything, day, path, sure))


def test_a_function_becomes_a_schema():
    tool = Tool.from_function(everything)
    assert (tool.name, tool.description) == ("everything", "Do everything at once,\nand more.")
    schema = tool.parameters.schema
    properties = schema["properties"]
    assert schema["required"] == ["place", "count", "share"]
    assert schema["additionalProperties"] is False
    place = {"type": "object", "properties": {"city": {"type": "string"}, "country": {"type": "string"}}, "required": ["city"]}
    assert properties["place"] == {**place, "additionalProperties": False, "description": "Where, by its name."}
    assert properties["count"] == {"type": "integer", "description": "How many."}
    assert properties["share"] == {"type": "number", "description": "Of 1."}
    assert properties["unit"] == {"type": "string", "enum": ["c", "f"], "default": "c"}
    assert properties["mode"] == {"type": "string", "enum": ["fast", "slow"], "default": "fast"}
    assert properties["names"] == {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}], "default": None}
    assert properties["table"]["anyOf"][0] == {"type": "object", "additionalProperties": {"type": "integer"}}
    assert properties["either"] == {"anyOf": [{"type": "integer"}, {"type": "string"}], "default": 1}
    assert properties["pair"]["prefixItems"] == [{"type": "integer"}, {"type": "string"}]
    assert properties["notes"]["items"]["properties"] == {"text": {"type": "string"}}
    assert properties["anything"] == {"default": None}
    assert properties["day"] == {"type": "string", "format": "date"}
    assert properties["path"] == {"type": "string", "description": "Where it lies."}


def test_arguments_arrive_as_their_annotations_say():
    given = {"place": {"city": "Nice"}, "count": 2, "share": 1, "unit": "f", "day": "2026-01-02", "path": "x", "names": ["a"]}
    text = Tool.from_function(everything).run(json.dumps(given))
    expected = everything(Place("Nice"), 2, 1.0, Unit.FAHRENHEIT, day=date(2026, 1, 2), path=Path("x"), names=["a"])
    assert text == expected


def test_results_are_text_or_json():
    def made() -> Place:
        """Make one."""
        return Place("Nice")

    assert Tool.from_function(made).run("{}") == '{"city": "Nice", "country": "FR"}'
    assert Tool.from_function(made).run("") == '{"city": "Nice", "country": "FR"}'


def test_what_a_function_raises_is_one_line():
    def broken(x: int) -> int:
        raise ValueError("no\nway")

    tool = Tool.from_function(broken)
    with pytest.raises(ToolError, match=r"^broken failed: ValueError: no way$"):
        tool.run('{"x": 1}')
    for arguments in ('{"y": 1}', "[1]", "{", "{}"):
        with pytest.raises(ToolError, match="cannot be called with these arguments"):
            tool.run(arguments)
    with pytest.raises(ToolError, match="no Python function"):
        Tool("f").run("{}")


def test_pydantic_models_are_taken():
    pydantic = pytest.importorskip("pydantic")
    inner = pydantic.create_model("Inner", size=(int, ...))
    outer = pydantic.create_model("Outer", inner=(inner, ...))

    def build(what):
        return what.inner.size + 1

    build.__annotations__ = {"what": outer}
    tool = Tool.from_function(build)
    assert "Inner" in tool.parameters.schema["$defs"]
    assert tool.run('{"what": {"inner": {"size": 3}}}') == "4"


def test_plain_docstrings_and_sphinx_ones():
    def plain(x: int) -> int:
        """Only this."""
        return x

    def sphinx(x: int) -> int:
        """This.

        :param x: The number.
        :returns: It.
        """
        return x

    assert Tool.from_function(plain).description == "Only this."
    tool = Tool.from_function(sphinx)
    assert (tool.description, tool.parameters.schema["properties"]["x"]["description"]) == ("This.", "The number.")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda x: x, "has no name"),
        (3, "must be a function, a dict or a Tool, not a int"),
        ({"type": "web_search"}, "type must be 'function'"),
        ({"type": "function", "function": 3}, "function must be a dict"),
        ({"description": "x"}, "must have a name"),
        ({"name": ""}, "name must be a text of 1 to 256 characters"),
        ({"name": "f", "parameters": 3}, "f: parameters: a schema is a dict"),
        ({"name": "f", "parameters": {"type": "array"}}, "must be the schema of an object"),
        ({"name": "f", "strict": 3}, "strict must be true or false"),
        ({"name": "f", "description": 3}, "description must be a text"),
    ],
)
def test_what_is_no_tool_is_refused(given, words):
    with pytest.raises(PromptError, match=re.escape("tools[0]") + ".*" + words):
        offered([given])


def test_parameters_without_a_json_type_are_refused():
    def bad(x: complex) -> None: ...
    def starred(*x: int) -> None: ...
    def unknown(x: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    for function, words in ((bad, r"bad\(x\): complex has no JSON type"), (starred, r"starred\(\*x"), (unknown, "cannot be read")):
        with pytest.raises(PromptError, match=words):
            offered([function])


def test_dicts_of_every_shape():
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    inner = {"name": "f", "description": "F.", "parameters": schema, "strict": True}
    for given in ({"type": "function", "function": inner}, {"type": "function", **inner}, inner):
        tool = Tool.from_dict(given)
        assert (tool.name, tool.description, tool.parameters.schema, tool.strict) == ("f", "F.", schema, True)
    assert Tool.from_dict({"name": "f"}).parameters.schema == {"type": "object", "properties": {}}
    assert Tool.from_dict({"name": "f", "input_schema": schema}).parameters.schema == schema
    assert Tool.from_dict(tool.as_openai()).parameters == tool.parameters


def test_choices():
    tools = offered([{"name": "f"}, {"name": "g"}])
    assert chosen("auto", tools) == ToolChoice()
    assert chosen("required", tools, parallel=False) == ToolChoice("required", None, False)
    assert chosen("g", tools) == ToolChoice("required", "g")
    assert chosen("auto", {}) == chosen("none", tools) == ToolChoice("none")
    assert chosen(ToolChoice("required", "f"), tools).name == "f"
    for choice, words in (("h", "the tools are f, g"), (3, "must be"), (ToolChoice("required", "h"), "no tool is called")):
        with pytest.raises(PromptError, match=words):
            chosen(choice, tools)
    with pytest.raises(PromptError, match="two tools called 'f'"):
        offered([{"name": "f"}, {"name": "f"}])
    assert ToolCall("id", "f", "{}").name == "f"
