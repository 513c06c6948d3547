"""Constraints on answers, in the fields of each dialect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Union

from pydantic import Discriminator, Field, Tag

from ...errors import SamplingError
from ...structure import JSON_OBJECT, Choice, Lark, Regex, Schema, Structure, closed
from ..errors import APIError, from_engine_error, invalid
from ..validation import FIRST_ERROR_ONLY, OneOf, StrictModel, Unsupported

MAX_CHOICES = 4096


def _kind_of_schema(value: Any) -> str:
    return "<text>" if isinstance(value, str) else "<bool>" if isinstance(value, bool) else "<object>"


SchemaField = Annotated[
    Union[Annotated[str, Tag("<text>")], Annotated[bool, Tag("<bool>")], Annotated[dict[str, Any], Tag("<object>")]],
    Discriminator(_kind_of_schema),
]
"""A JSON Schema, or its text."""
Choices = Annotated[list[str], FIRST_ERROR_ONLY, Field(min_length=1, max_length=MAX_CHOICES)]


class NamedSchema(StrictModel):
    """A schema in the form of OpenAI's clients. `strict` has no effect: every schema constrains the answer."""

    name: Annotated[str, Field(max_length=256)] | None = None
    description: str | None = None
    schema_: SchemaField = Field(True, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """OpenAI's `response_format`. llama.cpp's clients put the schema next to the type."""

    type: Annotated[str, OneOf("text", "json_object", "json_schema")]
    json_schema: NamedSchema | None = None
    schema_: SchemaField | None = Field(None, alias="schema")

    def structure(self, field: str) -> Structure | None:
        """The constraint, or None for text. Raises `APIError`."""
        if self.type == "text":
            return None
        found = self.schema_ if self.json_schema is None else self.json_schema.schema_
        if self.type == "json_object" and found is None:
            return JSON_OBJECT
        if found is None:
            raise invalid(f"{field}.json_schema: a schema is needed", f"{field}.json_schema", "invalid_value")
        return structure_from(field, found, Schema)


class SchemaFormat(NamedSchema):
    """The same fields without nesting: `text.format` of Responses, `output_config.format` of Anthropic's messages."""

    type: Annotated[str, OneOf("text", "json_object", "json_schema")]

    def structure(self, field: str) -> Structure | None:
        """The constraint, or None for text. Raises `APIError`."""
        if self.type == "text":
            return None
        return JSON_OBJECT if self.type == "json_object" else structure_from(field, self.schema_, Schema)


class StructuredOutputs(StrictModel):
    """vLLM's `structured_outputs`: at most one of the fields up to `grammar`."""

    json_: SchemaField | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    structural_tag: Annotated[Any, Unsupported()] = None
    whitespace_pattern: Annotated[Any, Unsupported()] = None
    disable_any_whitespace: Annotated[Any, Unsupported(False)] = None
    disable_additional_properties: bool | None = None

    def structure(self, field: str) -> Structure | None:
        """The constraint, or None for text. Raises `APIError`."""
        kinds: dict[str, tuple[Any, Callable[[Any], Structure]]] = {
            "json": (self.json_, _closed_schema if self.disable_additional_properties else Schema),
            "regex": (self.regex, Regex),
            "choice": (self.choice, Choice),
            "grammar": (self.grammar, Lark),
        }
        given = {
            f"{field}.{name}": structure_from(f"{field}.{name}", value, kind) for name, (value, kind) in kinds.items() if value is not None
        }
        return only_one(given | ({f"{field}.json_object": JSON_OBJECT} if self.json_object else {}))


def _closed_schema(value: Any) -> Schema:
    return Schema(closed(Schema(value).schema))


def only_one(given: Mapping[str, Structure | None]) -> Structure | None:
    """The only structure in `given`, which maps field names to structures; None if there is none. Raises `APIError` for two."""
    found = {field: structure for field, structure in given.items() if structure is not None}
    if len(found) > 1:
        first, second, *_ = found
        raise invalid(f"{second}: an answer cannot be held to this and {first} at once", second, "invalid_value")
    return next(iter(found.values()), None)


def structure_from(field: str, value: Any, kind: Callable[[Any], Structure]) -> Structure:
    """The structure of a field's value. Raises `APIError` that names the field."""
    try:
        return kind(value)
    except SamplingError as error:
        raise structure_refused(error, field) from None


def structure_refused(error: SamplingError, field: str) -> APIError:
    """The error response to an unsupported structure, with the name of the request's own field."""
    message = str(error)
    return from_engine_error(SamplingError(field + message.removeprefix("structure")) if message.startswith("structure") else error)
