"""Reads a checkpoint's `response_template`, transformers' declaration of an answer's format (5.13 and later).

A field has literals or regular expressions that open and close it. Supported expressions are literals with `\\s*` and one group each for
name, key or value. Supported contents are "json" and "xml-inline". Anything else is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .format import CallFormat, OutputFormat, ReasoningFormat

_REASONING = ("reasoning_content", "reasoning", "thinking")
_GROUP = re.compile(r"\(\?P<(name|key|value|id)>(?:[^()\\]|\\.|\([^()]*\))*\)")
_PLAIN = re.compile(r"(?:[^\\.*+?()\[\]{}|^$]|\\[^\w\s])*")


def read_response_template(template: Mapping[str, Any]) -> OutputFormat | None:
    """Return the supported part of the format; None if neither reasoning nor calls are supported."""
    fields = template.get("fields") if isinstance(template, Mapping) else None
    if not isinstance(fields, Mapping):
        return None
    reasoning = next((found for name in _REASONING if (found := _reasoning(fields.get(name)))), None)
    calls = _calls(fields.get("tool_calls"))
    if reasoning is None and calls is None:
        return None
    return OutputFormat(reasoning, calls, "response_template")


def _reasoning(field: Any) -> ReasoningFormat | None:
    if not isinstance(field, Mapping):
        return None
    begin, end = _pieces(field, "open"), _pieces(field, "close")
    if begin is None or end is None or len(begin) != 1 or len(end) != 1 or not begin[0].strip() or not end[0].strip():
        return None
    return ReasoningFormat(begin[0].strip(), end[0].strip())


def _pieces(field: Mapping[str, Any], key: str) -> list[str] | None:
    """Return the literals that open or close a field, split at groups; None if unsupported."""
    literal, pattern = field.get(key), field.get(f"{key}_pattern")
    if isinstance(literal, list) and literal:
        literal = literal[0]
    if isinstance(literal, str):
        return [literal]
    return _literals_between_groups(pattern) if isinstance(pattern, str) else None


def _literals_between_groups(pattern: str) -> list[str] | None:
    """Return the literals between the groups of an expression; whitespace of any length becomes a line break."""
    pieces = []
    for piece in _GROUP.split(pattern)[::2]:
        plain = piece.replace(r"\s*", "\n").replace(r"\n?", "\n").replace(r"\s+", "\n").replace(r"\n", "\n").replace(r"\t", "\t")
        if not _PLAIN.fullmatch(plain):
            return None
        pieces.append(re.sub(r"\\(.)", r"\1", plain))
    return pieces


def _calls(field: Any) -> CallFormat | None:
    if not isinstance(field, Mapping):
        return None
    begin, end = _pieces(field, "open"), _pieces(field, "close")
    if not begin or not begin[0].strip() or (end is None and ("close" in field or "close_pattern" in field)):
        return None
    call_end = "".join(end or [""])
    arguments = field.get("content_args")
    arguments = arguments if isinstance(arguments, Mapping) else {}
    if len(begin) == 2:
        found = CallFormat("json", call_begin=begin[0].lstrip(), name_end=begin[1], call_end=call_end, separator="\n")
        return _named(found, field.get("content"), arguments)
    if len(begin) != 1 or field.get("content") != "json":
        return None
    keys = _keys(field.get("transform"), "" if field.get("transform_each") else "content.")
    if keys is None:
        return None
    listed = CallFormat("object", section_begin=begin[0].lstrip() + "[", section_end="]" + call_end, separator=", ")
    single = CallFormat("object", call_begin=begin[0].strip() + "\n", call_end="\n" + call_end, separator="\n")
    return replace(listed if field.get("transform_each") else single, name_key=keys[0], arguments_key=keys[1])


def _keys(transform: Any, prefix: str) -> tuple[str, str] | None:
    """Return the keys of name and arguments in a call's object; None if unsupported."""
    function = transform.get("function") if isinstance(transform, Mapping) else None
    if function is None and prefix and transform is None:
        return "name", "arguments"
    if function == "{content}":
        return "name", "arguments"
    if not isinstance(function, Mapping):
        return None
    keys = [str(function.get(name, "")) for name in ("name", "arguments")]
    found = [key[1 + len(prefix) : -1] for key in keys if key.startswith("{" + prefix) and key.endswith("}")]
    return (found[0], found[1]) if len(found) == 2 and all(found) else None


def _named(found: CallFormat, content: Any, arguments: Mapping[str, Any]) -> CallFormat | None:
    """Return the format of a call whose opening literal has the name; None if unsupported."""
    quotes = arguments.get("string_delims")
    if content == "json" and isinstance(quotes, list) and quotes and isinstance(quotes[0], list) and quotes[0]:
        quote = str(quotes[0][0])
        return replace(found, kind="gemma", quote=quote, separator="") if quote.strip() else None
    if content == "json" and not arguments.get("unquoted_keys"):
        return found
    pattern = arguments.get("tag_pattern")
    pieces = _literals_between_groups(pattern) if content == "xml-inline" and isinstance(pattern, str) else None
    if pieces is None or len(pieces) != 3 or not all(piece.strip() for piece in pieces):
        return None
    return replace(
        found,
        kind="tagged",
        name_end=found.name_end + "\n",
        key_begin=pieces[0].lstrip(),
        key_end=pieces[1],
        value_end=pieces[2] + "\n",
    )
