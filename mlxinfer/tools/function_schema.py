"""JSON Schema of a Python function's parameters, and calls with JSON. Imported only if a tool is a Python function.

`pydantic.create_model` would need less code. But it rejects `typing.TypedDict` before Python 3.12, drops parameters such as `_x` silently,
and warns about parameters named `schema` or `copy`. Its schemas are a third longer, which the model reads in each prompt (1,731 characters
against 1,305 for the test's function), and the first one takes about 0.1 s with the import.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time
from enum import Enum
from pathlib import PurePath
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints
from uuid import UUID

from ..errors import PromptError, ToolError, one_line

_PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    None: {"type": "null"},
    Any: {},
    object: {},
    inspect.Parameter.empty: {},
    list: {"type": "array"},
    tuple: {"type": "array"},
    set: {"type": "array"},
    frozenset: {"type": "array"},
    dict: {"type": "object"},
    datetime: {"type": "string", "format": "date-time"},
    date: {"type": "string", "format": "date"},
    time: {"type": "string", "format": "time"},
    UUID: {"type": "string", "format": "uuid"},
}
_FROM_TEXT: dict[Any, Callable[[str], Any]] = {
    datetime: lambda text: datetime.fromisoformat(text.replace("Z", "+00:00")),
    date: date.fromisoformat,
    time: time.fromisoformat,
    UUID: UUID,
}
_UNIONS = (Union, types.UnionType)
_LISTS = (list, set, frozenset, tuple)
_SECTIONS = "Args|Arguments|Parameters|Returns|Return|Raises|Yields|Examples?|Notes?|Attributes"


def name_of(function: Callable[..., Any]) -> str:
    """The function's name. Raises `PromptError` for a callable without one."""
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        raise PromptError(f"tools: {function!r:.100} has no name: define it with def")
    return str(name)


def description_of(function: Callable[..., Any]) -> str:
    """The function's docstring, up to the sections about arguments and results."""
    return re.split(rf"\n\s*(?:{_SECTIONS}):\s*\n|\n\s*:(?:param|returns?|raises)\b", inspect.getdoc(function) or "")[0].strip()


def parameters_of(function: Callable[..., Any]) -> dict[str, Any]:
    """JSON Schema of the function's arguments. Raises `PromptError` if an annotation has no JSON type."""
    name, described = name_of(function), _described(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required = []
    defs: dict[str, Any] = {}
    for parameter, annotation in _typed_parameters(function):
        schema = _schema(annotation, f"{name}({parameter.name})", defs, ())
        if parameter.name in described:
            schema.setdefault("description", described[parameter.name])
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
        else:
            schema |= _default(parameter.default)
        properties[parameter.name] = schema
    shared = {"$defs": defs} if defs else {}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False, **shared}


def called(function: Callable[..., Any], arguments: str) -> str:
    """Call the function with the JSON text of an object; each value is converted to its annotated type.

    Returns a text unchanged, anything else as JSON. Raises `ToolError` if the arguments do not fit or the function raises.
    """
    name = name_of(function)
    try:
        values = json.loads(arguments or "{}")
        if not isinstance(values, dict):
            raise ValueError("they are not an object")
        known = {parameter.name: annotation for parameter, annotation in _typed_parameters(function)}
        inspect.signature(function).bind(**values)
        made = {key: _made(known[key], value) for key, value in values.items()}
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ToolError(f"{name} cannot be called with these arguments: {one_line(error)}") from None
    try:
        result = function(**made)
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=_plain)
    except Exception as error:
        raise ToolError(f"{name} failed: {type(error).__name__}: {one_line(error)}") from error


def _typed_parameters(function: Callable[..., Any]) -> Iterable[tuple[inspect.Parameter, Any]]:
    name = name_of(function)
    try:
        hints = get_type_hints(function, include_extras=True)
        signature = inspect.signature(function)
    except (NameError, TypeError, ValueError) as error:
        raise PromptError(f"tools: {name}: its annotations cannot be read: {one_line(error)}") from None
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise PromptError(f"tools: {name}({parameter}): a tool's parameters have names, so this one cannot be given")
        yield parameter, hints.get(parameter.name, inspect.Parameter.empty)


def _schema(annotation: Any, where: str, defs: dict[str, Any], within: tuple[Any, ...]) -> dict[str, Any]:
    """Schema of one type. `within` are the classes that contain it."""
    if annotation in within:
        raise PromptError(f"tools: {where}: {annotation.__name__} contains itself, which a tool's parameter cannot")
    origin, args = get_origin(annotation), get_args(annotation)
    if not args and origin in (*_LISTS, dict):  # typing.List and similar, without a type inside
        annotation, origin = origin, None
    if origin is Annotated:
        return {**_schema(args[0], where, defs, within), **_note(args[1:])}
    if origin in _UNIONS:
        return {"anyOf": [_schema(one, where, defs, within) for one in args]}
    if origin is Literal:
        return _one_of(args)
    if origin in _LISTS or (inspect.isclass(origin) and issubclass(origin, Iterable) and not issubclass(origin, Mapping)):
        return _array(origin, args, where, defs, within)
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        if args[0] is not str:
            raise PromptError(f"tools: {where}: the keys of {annotation} must be str")
        return {"type": "object", "additionalProperties": _schema(args[1], where, defs, within)}
    if isinstance(annotation, typing.Hashable) and annotation in _PLAIN:
        return dict(_PLAIN[annotation])
    found = _of_class(annotation, where, defs, within) if inspect.isclass(annotation) else None
    if found is None:
        raise PromptError(f"tools: {where}: {getattr(annotation, '__name__', annotation)} has no JSON type")
    return found


def _of_class(kind: type, where: str, defs: dict[str, Any], within: tuple[Any, ...]) -> dict[str, Any] | None:
    """Schema of an enumeration, a pydantic model, a dataclass, a TypedDict or a path; None for any other class."""
    if issubclass(kind, Enum):
        return _one_of([member.value for member in kind])
    if issubclass(kind, PurePath):
        return {"type": "string"}
    if callable(getattr(kind, "model_json_schema", None)):
        schema: dict[str, Any] = kind.model_json_schema()  # type: ignore[attr-defined]
        defs |= schema.pop("$defs", {})
        return schema
    if dataclasses.is_dataclass(kind):
        fields = [one for one in dataclasses.fields(kind) if one.init]
        required = [one.name for one in fields if one.default is one.default_factory is dataclasses.MISSING]
        names = [one.name for one in fields]
    elif typing.is_typeddict(kind):
        names, required = list(kind.__annotations__), [name for name in kind.__annotations__ if name in kind.__required_keys__]  # type: ignore[attr-defined]
    else:
        return None
    hints = get_type_hints(kind, include_extras=True)
    properties = {name: _schema(_unwrapped(hints[name]), f"{where}.{name}", defs, (*within, kind)) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _unwrapped(annotation: Any) -> Any:
    """The type inside `Required` or `NotRequired`, else `annotation` itself."""
    return get_args(annotation)[0] if getattr(get_origin(annotation), "_name", "") in ("Required", "NotRequired") else annotation


def _array(origin: Any, args: tuple[Any, ...], where: str, defs: dict[str, Any], within: tuple[Any, ...]) -> dict[str, Any]:
    if origin is tuple and args[-1:] != (...,):
        items = [_schema(one, where, defs, within) for one in args]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items), "maxItems": len(items)}
    return {"type": "array", "items": _schema(args[0], where, defs, within)}


def _one_of(values: Iterable[Any]) -> dict[str, Any]:
    values = list(values)
    kinds = {type(value) for value in values}
    same = {"type": _PLAIN[kinds.pop()]["type"]} if len(kinds) == 1 and kinds <= {str, int, float, bool} else {}
    return {**same, "enum": values}


def _note(extras: tuple[Any, ...]) -> dict[str, Any]:
    """The description among the extras of `Annotated`: a text, or the `description` of an object such as pydantic's `Field`."""
    for extra in extras:
        text = extra if isinstance(extra, str) else getattr(extra, "description", None)
        if isinstance(text, str):
            return {"description": text}
    return {}


def _default(value: Any) -> dict[str, Any]:
    value = value.value if isinstance(value, Enum) else value
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return {}
    return {"default": value}


def _described(doc: str) -> dict[str, str]:
    """Descriptions of arguments in a docstring: Google's `Args:` section, or `:param name:` lines."""
    found = {name: " ".join(text.split()) for name, text in re.findall(r":param (?:[^:]* )?(\w+):((?:.|\n)*?)(?=\n\s*:|\n\n|\Z)", doc)}
    section = re.search(r"^(?:Args|Arguments|Parameters):\s*\n((?:[ \t]+.*\n?|\s*\n)*)", doc, re.MULTILINE)
    if section is None:
        return found
    name, indent = "", None
    for line in section[1].splitlines():
        begins = re.match(r"([ \t]+)\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)", line)
        if begins and (indent is None or len(begins[1]) <= indent):
            indent, name = len(begins[1]), begins[2]
            found[name] = begins[3].strip()
        elif name and line.strip():
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found


def _made(annotation: Any, value: Any) -> Any:
    """Convert a JSON value to its annotated type: enumerations, dataclasses and models; other values stay."""
    origin, args = get_origin(annotation), get_args(annotation)
    if not args and origin in (*_LISTS, dict):  # typing.List and similar, without a type inside
        annotation, origin = origin, None
    if origin is Annotated:
        return _made(args[0], value)
    if origin in _UNIONS:
        return _made_one(args, value)
    if origin in _LISTS and isinstance(value, list):
        kinds = args if origin is tuple and args[-1:] != (...,) else [args[0]] * len(value)
        return origin(_made(kind, item) for kind, item in zip(kinds, value, strict=True))
    if inspect.isclass(origin) and issubclass(origin, Mapping) and isinstance(value, dict):
        return {key: _made(args[1], item) for key, item in value.items()}
    if not inspect.isclass(annotation):
        return value
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if annotation in _FROM_TEXT:
        return _FROM_TEXT[annotation](value)
    if issubclass(annotation, (Enum, PurePath)):
        return annotation(value)
    if callable(getattr(annotation, "model_validate", None)):
        return annotation.model_validate(value)  # type: ignore[attr-defined]
    if dataclasses.is_dataclass(annotation) and isinstance(value, dict):
        hints = get_type_hints(annotation, include_extras=True)
        return annotation(**{key: _made(hints[key], item) for key, item in value.items()})
    return value


def _made_one(kinds: tuple[Any, ...], value: Any) -> Any:
    """Convert `value` to the first of several types that accepts it; a value that already has one of the types stays."""
    if type(value) in kinds:
        return value
    for kind in kinds:
        try:
            made = _made(kind, value)
        except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError):
            continue
        if made is not value:
            return made
    return value


def _plain(value: Any) -> Any:
    """A JSON value for an object that `json` does not encode."""
    if callable(getattr(value, "model_dump", None)):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    return value.value if isinstance(value, Enum) else str(value)
