"""Normalization of schemas for llguidance, and paths of unsupported parts."""

import copy
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.errors import SamplingError
from mlxinfer.structure import MAX_GRAMMAR_BYTES, Choice, Lark, Regex, Schema, closed
from mlxinfer.structured_output.schema import MAX_DEPTH, fault_path, normalized

CLOSED = {"additionalProperties": False}


def test_formats_that_are_annotations_are_dropped_wherever_a_schema_stands():
    binary = {"type": "string", "format": "binary"}
    schema = {
        "properties": {"format": binary},
        "items": [binary],
        "anyOf": [binary, {"type": "string", "format": "date"}],
        "additionalProperties": binary,
        "$defs": {"a": binary},
    }
    plain = {"type": "string"}
    assert normalized(schema) == {
        "properties": {"format": plain},
        "items": [plain],
        "anyOf": [plain, {"type": "string", "format": "date"}],
        "additionalProperties": plain,
        "$defs": {"a": plain},
    }


def test_values_are_not_schemas():
    schema = {"enum": [{"format": "binary"}], "const": {"format": "x"}, "default": {"propertyNames": True}}
    assert normalized(schema) == schema


def test_trivial_property_names_are_dropped_and_others_kept():
    for trivial in ({"type": "string"}, {}, True):
        assert normalized({"type": "object", "propertyNames": trivial}) == {"type": "object"}
    assert normalized({"propertyNames": {"pattern": "a"}}) == {"propertyNames": {"pattern": "a"}}


def test_a_client_does_not_set_options_of_the_engine():
    assert normalized({"x-guidance": {"lenient": True}, "items": {"x-guidance": {}}}) == {"items": {}}


def test_depth_is_limited():
    deep = {}
    for _ in range(MAX_DEPTH + 1):
        deep = {"items": deep}
    with pytest.raises(RecursionError):
        normalized(deep)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["items", "anyOf", "properties", "format", "$ref"]), inner),
    max_leaves=20,
)


@given(json_values)
def test_anything_is_normalized_once_and_for_all(value):
    try:
        once = normalized(value)
    except SamplingError:  # a reference to a part that does not exist
        assert "$ref" in str(value)
        return
    assert normalized(once) == once


def test_the_innermost_part_with_the_same_fault_is_named():
    def fault(schema):
        return "no sets" if "uniqueItems" in str(schema) else ""

    schema = {"properties": {"a": {"type": "string"}, "b": {"anyOf": [{}, {"items": {"uniqueItems": True}}]}}}
    assert fault_path(schema, fault) == "properties.b.anyOf[1].items"
    assert fault_path({"uniqueItems": True}, fault) == ""
    assert fault_path(True, lambda schema: "x") == ""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Schema("{"), "the schema is not JSON"),
        (lambda: Schema("[]"), "a schema is a dict, a pydantic model or JSON text, not a list"),
        (lambda: Schema(7), "not a int"),
        (lambda: Schema({"const": float("nan")}), "the schema is not JSON"),
        (lambda: Schema({"const": object()}), "the schema is not JSON"),
        (lambda: Schema({"const": "x" * MAX_GRAMMAR_BYTES}), "are allowed: make it shorter"),
        (lambda: Regex(""), "regex must be a non-empty text"),
        (lambda: Regex("\ud800"), "lone surrogate"),
        (lambda: Lark(None), "grammar must be a non-empty text"),
        (lambda: Choice([]), "choice must be a list of non-empty texts"),
        (lambda: Choice("yes"), "choice must be a list"),
        (lambda: Choice(["a", ""]), "choice must be a list"),
    ],
)
def test_what_is_no_structure_is_refused_when_it_is_made(make, message):
    with pytest.raises(SamplingError, match=message):
        make()


def test_a_pydantic_model_is_its_schema():
    pydantic = pytest.importorskip("pydantic")

    class City(pydantic.BaseModel):
        name: str

    assert Schema(City).schema["properties"]["name"] == {"title": "Name", "type": "string"}
    assert Schema(pydantic.TypeAdapter(list[int])).schema == {"type": "array", "items": {"type": "integer"}}


def test_a_pydantic_model_has_its_own_fields_only():
    pydantic = pytest.importorskip("pydantic")

    class Street(pydantic.BaseModel):
        properties: dict[str, int]

    class Free(pydantic.BaseModel, extra="allow"):
        name: str

    class City(pydantic.BaseModel):
        streets: list[Street]
        other: Free | None

    held = Schema(City).schema
    assert held["additionalProperties"] is False
    assert held["$defs"]["Street"]["additionalProperties"] is False
    assert held["$defs"]["Street"]["properties"]["properties"]["additionalProperties"] == {"type": "integer"}
    assert held["$defs"]["Free"]["additionalProperties"] is True
    assert "additionalProperties" not in Schema({"properties": {"a": {}}}).schema


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"properties": {"a": {"const": {"properties": {}}}}}, {"properties": {"a": {"const": {"properties": {}}}}, **CLOSED}),
        ({"anyOf": [{"properties": {}}, True]}, {"anyOf": [{"properties": {}, **CLOSED}, True]}),
        ({"properties": {}, "anyOf": [{"properties": {"b": True}}]}, None),
        ({"allOf": [{"properties": {}}, {"properties": {}}]}, None),
        ({"properties": {}, "patternProperties": {"^x": {}}}, None),
        (
            {"properties": {}, "additionalProperties": {"properties": {}}},
            {"properties": {}, "additionalProperties": {"properties": {}, **CLOSED}},
        ),
        (True, None),
    ],
)
def test_objects_are_closed_where_nothing_else_may_add_to_them(schema, expected):
    assert closed(schema) == (schema if expected is None else expected)


def test_a_schema_that_is_nested_too_deeply_is_not_closed():
    schema: dict = {}
    for _ in range(sys.getrecursionlimit()):
        schema = {"properties": {"a": schema}}
    with pytest.raises(SamplingError, match="nested too deeply"):
        closed(schema)


def test_closing_leaves_the_given_schema_as_it_was():
    given = {"$defs": {"a": {"properties": {}}}, "prefixItems": [{"properties": {}}], "items": {"properties": {}}}
    before = copy.deepcopy(given)
    one = {"properties": {}, **CLOSED}
    assert closed(given) == {"$defs": {"a": one}, "prefixItems": [one], "items": one}
    assert given == before


@pytest.mark.parametrize(("divisor", "held"), [(10_000, True), (0.01, True), (10_001, False), (2**31, False), (1.00001, False)])
def test_divisors_of_many_states_are_refused(divisor, held):
    schema = {"properties": {"a": {"multipleOf": divisor}}}
    if held:
        assert normalized(schema) == schema
    else:
        with pytest.raises(SamplingError, match="multipleOf"):
            normalized(schema)
