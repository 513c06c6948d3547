"""Schemas of `mlxinfer run`: fields in a line or several, JSON, and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.models.tiny_directory import tiny_directory

from mlxinfer import LLM, SamplingParams
from mlxinfer.cli.common.schemas import concise_schema, schema_of
from mlxinfer.errors import SamplingError


def test_fields_have_a_type_and_a_description() -> None:
    schema = concise_schema("name, age int, tall bool, weight float: in kg")
    assert schema is not None
    assert schema["properties"] == {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tall": {"type": "boolean"},
        "weight": {"type": "number", "description": "in kg"},
    }
    assert schema["required"] == ["name", "age", "tall", "weight"]


def test_descriptions_may_have_commas_if_each_field_has_a_line() -> None:
    schema = concise_schema("\n name: first, then last\n age int\n")
    assert schema is not None
    assert schema["properties"] == {"name": {"type": "string", "description": "first, then last"}, "age": {"type": "integer"}}


@pytest.mark.parametrize("text", ["", "city.json", "schemas/city", "a b c", "name, 5"])
def test_other_texts_are_not_fields(text: str) -> None:
    assert concise_schema(text) is None


def test_an_unknown_type_is_named() -> None:
    with pytest.raises(SamplingError, match="'integer' is not a type: use str, int, float, bool"):
        concise_schema("age integer")


def test_json_and_files_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert schema_of(json.dumps(schema)).schema == schema
    (tmp_path / "name").write_text(json.dumps(schema))
    monkeypatch.chdir(tmp_path)
    assert schema_of("name").schema == schema, "a file of this name comes first"
    assert schema_of("name", several=True).schema["properties"]["items"] == {"type": "array", "items": schema}
    with pytest.raises(FileNotFoundError):
        schema_of("nosuch.json")


def test_the_answer_fits_the_fields(call, tmp_path: Path) -> None:
    model = str(tiny_directory(tmp_path / "model", rounded=True))
    asked = ("run", model, "hello", "-t", "0", "--max-tokens", "12")
    with LLM(model) as llm:
        for option, several in (("--schema", False), ("--schema-multi", True)):
            params = SamplingParams(temperature=0, max_tokens=12, structure=schema_of("tall bool", several=several))
            assert call(*asked, option, "tall bool").out == llm.chat("hello", params).text + "\n"
    assert "exclude each other" in call(*asked, "--schema", "a", "--schema-multi", "b").err
    assert "nosuch.json: no such file" in call(*asked, "--schema", "nosuch.json").err
