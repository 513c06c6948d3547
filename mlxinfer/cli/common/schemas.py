"""The schema of `mlxinfer run`: a file, JSON, or a list of fields such as "name, age int"."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import click

from ...errors import SamplingError
from ...structure import Schema
from .console import as_text

_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
_FIELD = re.compile(r"([A-Za-z_][\w-]*)(?:\s+(\w+))?\s*(?::\s*(.*))?")


def schema_of(text: str, *, several: bool = False) -> Schema:
    """Return the schema of `--schema`; with `several`, of a list of such objects. Raises `SamplingError` and `OSError`."""
    schema = Schema(_source(text))
    return Schema(_list_of(schema.schema)) if several else schema


def _source(text: str) -> Any:
    """Return a schema as JSON text or a dict: "-" is standard input."""
    if text == "-":
        return as_text(sys.stdin.buffer.read(), "standard input")
    if text.lstrip().startswith("{"):
        return text
    if not _is_file(text) and (fields := concise_schema(text)) is not None:
        return fields
    return as_text(Path(text).expanduser().read_bytes(), text)


def _is_file(text: str) -> bool:
    try:
        return Path(text).expanduser().exists()
    except (OSError, ValueError):
        return False


def concise_schema(text: str) -> dict[str, Any] | None:
    """Return the schema of a list of fields, as the tool `llm` has them; None if the text is not one.

    Fields are separated by commas, or are one a line. Each is a name, a type (str without one) and a description after a colon. Raises
    `SamplingError` for an unknown type.
    """
    found = [_FIELD.fullmatch(part.strip()) for part in text.split("\n" if "\n" in text.strip() else ",") if part.strip()]
    if not found:
        return None
    properties: dict[str, Any] = {}
    for field in found:
        if field is None:
            return None
        name, kind, description = field.groups()
        if kind not in (None, *_TYPES):
            raise SamplingError(f"{kind!r} is not a type: use {', '.join(_TYPES)}")
        properties[name] = {"type": _TYPES[kind or "str"]} | ({"description": description} if description else {})
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _list_of(schema: Any) -> dict[str, Any]:
    """Return the schema of `{"items": [...]}`."""
    items = {"type": "array", "items": schema}
    return {"type": "object", "properties": {"items": items}, "required": ["items"], "additionalProperties": False}


def _callback(ctx: click.Context, param: click.Parameter, text: str | None) -> Schema | None:
    if text is None:
        return None
    if "schema" in ctx.params and ctx.params["schema"] is not None:
        raise click.UsageError("--schema and --schema-multi exclude each other")
    shown = text if len(text) <= 40 else f"{text[:39]}…"
    try:
        return schema_of(text, several=param.name == "schema_multi")
    except OSError as error:
        raise click.BadParameter(f"{shown}: {(error.strerror or str(error)).lower()}") from None
    except SamplingError as error:
        raise click.BadParameter(f"{shown}: {str(error).removeprefix('structure: ')}") from None


def schema_options(command: Any) -> Any:
    """Add `--schema` and `--schema-multi`."""
    multi = click.option(
        "--schema-multi", type=click.Path(), metavar="SCHEMA", callback=_callback, help='The same for a list: {"items": [...]}.'
    )
    fields = "Make the answer JSON that fits: fields such as 'name, age int', a JSON Schema, or a file with one; - is standard input."
    return click.option("--schema", type=click.Path(), metavar="SCHEMA", callback=_callback, help=fields)(multi(command))
