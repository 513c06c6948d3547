"""Derives the call format from a chat template: renders calls with marked names and values, and reads the literals around them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..errors import MLXInferError, TemplateError
from ..structure import Schema
from ..tools import Tool, Tools
from .format import CallFormat
from .streaming_match import ID, KEY

USER, CONTENT, RESULT = "userQuux", "contZeta", "resultDelta"
NAMES, KEYS = ("fnAlpha", "fnOmega"), ("keyBeta", "keyDelta")
TEXT, NUMBER = "valGamma", 7391
_IDS = ("idone0001", "idtwo0002")
_LONG_ID = "call_0123456789abcdef01234567"
_MARKED = {KEYS[0]: TEXT, KEYS[1]: NUMBER}
_PROPERTIES = {
    KEYS[0]: {"type": "string", "description": "x"},
    KEYS[1]: {"type": "integer", "description": "y"},
    "keyObject": {"type": "object", "description": "z"},
}


class Templates(Protocol):
    """Part of a tokenizer that renders chats."""

    @property
    def chat_template(self) -> str | None: ...

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, tools: Any = None, **variables: Any
    ) -> str: ...


_MOST_SECONDS = 3.0
_LONGEST = 200_000


class Bounded:
    """A chat template with limits on processor time and length, as it comes from the model's files and runs before the first chat."""

    def __init__(self, templates: Templates) -> None:
        self.chat_template = templates.chat_template
        self._templates = templates
        self._spent = 0.0

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, tools: Any = None, **variables: Any
    ) -> str:
        """Render a chat. Raises `TemplateError` as the template does, or once a limit is exceeded."""
        if self._spent > _MOST_SECONDS:
            raise TemplateError("the chat template takes too long to be asked how it renders calls")
        began = time.thread_time()
        try:
            text = self._templates.render_chat(messages, add_generation_prompt=add_generation_prompt, tools=tools, **variables)
        finally:
            self._spent += time.thread_time() - began
        if len(text) > _LONGEST:
            raise TemplateError("the chat template renders too much for a short chat")
        return text


def marked_tools() -> Tools:
    """Tools used to render the marked calls."""
    return {name: Tool(name, "d", Schema({"type": "object", "properties": _PROPERTIES, "required": [KEYS[0]]})) for name in NAMES}


def calls_message(calls: Sequence[tuple[str, Any]], content: str = "", *, as_text: bool = False) -> dict[str, Any]:
    """Return an assistant message with these calls of (name, arguments), in the form that templates expect."""
    made = [
        {"id": _IDS[i % 2], "type": "function", "function": {"name": name, "arguments": json.dumps(given) if as_text else given}}
        for i, (name, given) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


def rendered(templates: Templates, messages: Sequence[Mapping[str, Any]], *, prompt: bool = False, tools: bool = True) -> str:
    """Return the text after the marked user message; "" if the template fails or omits that message."""
    offered = [tool.as_openai() for tool in marked_tools().values()] if tools else None
    try:
        text = templates.render_chat([{"role": "user", "content": USER}, *messages], tools=offered, add_generation_prompt=prompt)
    except MLXInferError:
        return ""
    return text.rpartition(USER)[2]


@dataclass(frozen=True)
class _Unit:
    """Span of a call in a rendered text, and the format of its inside."""

    start: int
    end: int
    calls: CallFormat


def typed_anyhow(calls: CallFormat) -> CallFormat:
    """Return the format with a placeholder for the value's type, where a literal names it."""
    same = len(_common(calls.key_end, calls.key_end_json))
    begin = re.sub(r"\w+$", "", calls.key_end_json[:same])
    return replace(calls, key_end_json=begin + ID + re.sub(r"^\w+", "", calls.key_end_json[len(begin) :]))


def calls_of_template(templates: Templates, ends: Sequence[str] = ()) -> tuple[CallFormat, bool] | None:
    """Return (call format, True if the template wants arguments as text); None if calls are not rendered or have an unknown shape.

    `ends` are the texts of the EOS tokens: a literal stops before them.
    """
    for as_text in (False, True):
        one = rendered(templates, [calls_message([(NAMES[0], _MARKED)], as_text=as_text)])
        if NAMES[0] in one and TEXT in one:
            found = _read_off(templates, one, as_text, ends)
            if found is not None:
                return found, as_text
    return None


def _read_off(templates: Templates, one: str, as_text: bool, ends: Sequence[str]) -> CallFormat | None:
    unit = _unit(one, NAMES[0], 0)
    if unit is None:
        return None
    before = _beginning(templates, one[: unit.start], as_text)
    turn_end = rendered(templates, [{"role": "assistant", "content": CONTENT}]).rpartition(CONTENT)[2]
    two = rendered(templates, [calls_message([(name, _MARKED) for name in NAMES], as_text=as_text)])
    first = _unit(two, NAMES[0], 0)
    second = _unit(two, NAMES[1], first.end) if first else None
    if first is None or second is None:
        call_end = _without_turn_end(one[unit.end :], turn_end, ends)
        return _generalized(replace(unit.calls, call_begin=before.lstrip(), call_end=call_end, parallel=False))
    between, after = two[first.end : second.start], two[second.end :]
    call_begin = _common_end(before, between)
    call_end = _common_start(between[: len(between) - len(call_begin)], _without_turn_end(after, turn_end, ends))
    lead = call_begin[: len(call_begin) - len(call_begin.lstrip())]
    found = replace(
        _merged(unit.calls, second.calls),
        section_begin=(before[: len(before) - len(call_begin)] + lead).lstrip(),
        call_begin=call_begin.lstrip(),
        call_end=call_end.rstrip(),
        separator=between[len(call_end.rstrip()) : len(between) - len(call_begin)] + lead,
        section_end=_without_turn_end(after, turn_end, ends)[len(call_end) :].rstrip(),
    )
    return _generalized(found)


def _generalized(calls: CallFormat) -> CallFormat:
    """Replace ids and numbers of the marked calls by placeholders."""
    pattern = re.compile("|".join(_IDS))
    fields = ("call_begin", "call_end", "name_end", "section_begin", "section_end", "separator")
    changed: dict[str, Any] = {name: pattern.sub(ID, getattr(calls, name)) for name in fields}
    return replace(calls, **changed)


def _merged(first: CallFormat, second: CallFormat) -> CallFormat:
    """Return the format of both calls, with a placeholder where `name_end` has a call's number or name."""
    if first.name_end == second.name_end:
        return first
    return replace(first, name_end=re.sub("|".join((*_IDS, NAMES[0], r"\d+")), ID, first.name_end))


def _beginning(templates: Templates, before: str, as_text: bool) -> str:
    """Return the part of `before` that belongs to the call.

    Candidates are the text that also stands there after content, and the text that replaces a prompt's end or content. The shortest that
    is not empty is chosen.
    """
    found = []
    with_content = rendered(templates, [calls_message([(NAMES[0], _MARKED)], CONTENT, as_text=as_text)])
    if CONTENT in with_content:
        text = with_content.partition(CONTENT)[2]
        unit = _unit(text, NAMES[0], 0)
        found += [_common_end(before, text[: unit.start])] if unit is not None else []
    for other in (
        rendered(templates, [], prompt=True),
        rendered(templates, [{"role": "assistant", "content": CONTENT}]).partition(CONTENT)[0],
    ):
        same = _common(before, other)
        inside = re.search(r"[<\[][|\w]*$", same)
        found.append(before[inside.start() if inside else len(same) :])
    return min((text for text in found if text.strip()), key=len, default="")


def _without_turn_end(text: str, turn_end: str, ends: Sequence[str]) -> str:
    """Return the text after a call without the end of the turn."""
    common = _common_end(text, turn_end).strip()
    if common:
        text = text[: text.rindex(common)]
    cuts = [text.index(end) for end in ends if end and end in text]
    return text[: min(cuts, default=len(text))]


def _common(one: str, other: str) -> str:
    """Return the common prefix."""
    size = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:size]


def _common_start(one: str, other: str) -> str:
    """Return the common prefix, without the first half of a tag."""
    common = _common(one, other)
    return common if common in (one, other) and not re.search(r"<[^<>]*$", common) else re.sub(r"[<\[][^<>\[\]]*$", "", common)


def _common_end(one: str, other: str) -> str:
    """Return the common suffix, without the second half of a tag."""
    common = _common(one[::-1], other[::-1])[::-1]
    return common if common == one == other or not re.match(r"[^<\[{]*[>\]]", common) else _without_half_tag(one, other, common)


def _without_half_tag(one: str, other: str, common: str) -> str:
    """Return a common suffix without the second half of a tag at its start."""
    if common in (one, other) and re.match(r"\s*[\[<>]", common) and not re.match(r"\s*>\s", common):
        return common
    return re.sub(r"^[^<\[{]*[>\]]", "", common)


def _unit(text: str, name: str, begin: int) -> _Unit | None:
    """Return the first call of `name` at or after `begin`, with the shape of its inside."""
    at = text.find(name, begin)
    if at < 0:
        return None
    return (
        _object(text, name, begin, at)
        or _json(text, name, at)
        or _gemma(text, name, at)
        or _pythonic(text, name, at)
        or _tagged(text, name, at)
    )


def _decoded(text: str, at: int) -> tuple[Any, int]:
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at


def _object(text: str, name: str, begin: int, at: int) -> _Unit | None:
    for start in sorted((found.start() for found in re.finditer("{", text[begin:at])), reverse=True):
        value, end = _decoded(text, begin + start)
        if isinstance(value, dict):
            name_key = next((key for key, item in value.items() if item == name), None)
            arguments_key = next((key for key, item in value.items() if item == _MARKED), None)
            if name_key and arguments_key:
                return _Unit(begin + start, end, CallFormat("object", name_key=name_key, arguments_key=arguments_key))
    return None


def _json(text: str, name: str, at: int) -> _Unit | None:
    after = at + len(name)
    start = text.find("{", after)
    value, end = _decoded(text, start) if start >= 0 else (None, 0)
    return _Unit(at, end, CallFormat("json", name_end=text[after:start])) if value == _MARKED else None


def _gemma(text: str, name: str, at: int) -> _Unit | None:
    pattern = rf"(.{{0,8}}?)\{{{KEYS[0]}:(\S{{1,16}}){TEXT}\2,{KEYS[1]}:{NUMBER}\}}"
    found = re.compile(pattern).match(text, at + len(name))
    return _Unit(at, found.end(), CallFormat("gemma", name_end=found[1], quote=found[2])) if found else None


def _pythonic(text: str, name: str, at: int) -> _Unit | None:
    found = re.compile(rf"\({KEYS[0]}=(['\"]){TEXT}\1, ?{KEYS[1]}={NUMBER}(?=\))").match(text, at + len(name))
    return _Unit(at, found.end(), CallFormat("pythonic", name_end="(")) if found else None


def _tagged(text: str, name: str, at: int) -> _Unit | None:
    after = at + len(name)
    places, place = [], after
    for mark in (KEYS[0], TEXT, KEYS[1], str(NUMBER)):
        place = text.find(mark, place)
        if place < 0:
            return None
        places.append((place, place + len(mark)))
        place += len(mark)
    (key1, key1_end), (value1, value1_end), (key2, key2_end), (value2, value2_end) = places
    before_key, key_end, between, key_end_json = text[after:key1], text[key1_end:value1], text[value1_end:key2], text[key2_end:value2]
    key_begin = _common_end(before_key, between)
    value_end = between[: len(between) - len(key_begin)].replace(KEYS[0], KEY)
    written = value_end.replace(KEY, KEYS[1])
    visible = all(map(str.strip, (key_end, key_end_json, value_end)))
    if not key_begin or not visible or not text.startswith(written, value2_end):
        return None
    calls = CallFormat("tagged", name_end=before_key[: len(before_key) - len(key_begin)], key_begin=key_begin, key_end=key_end)
    calls = replace(calls, key_end_json="" if key_end == key_end_json else key_end_json, value_end=value_end)
    return _Unit(at, value2_end + len(written), calls)


def knows(templates: Templates, as_text: bool = False) -> dict[str, Any]:
    """Return the parts of a chat that the template renders, as fields of `OutputFormat`."""
    answer = calls_message([(NAMES[0], _MARKED)], as_text=as_text)
    result = {"role": "tool", "name": NAMES[0], "tool_call_id": _IDS[0], "content": RESULT}
    user = {"role": "user", "content": USER}
    calls = rendered(templates, [answer])
    long_id = {**answer, "tool_calls": [{**answer["tool_calls"][0], "id": _LONG_ID}]}
    tools_known = KEYS[1] in _whole(templates, [user], tools=True)
    calls_known = NAMES[0] in calls and TEXT in calls
    return {
        "tools_in_template": tools_known,
        "calls_in_template": calls_known,
        # A template that writes any role's name renders results, but its model was not trained on them.
        "results_in_template": (tools_known or calls_known) and RESULT in _whole(templates, [user, answer, result], tools=True),
        "system_in_template": CONTENT in _whole(templates, [{"role": "system", "content": CONTENT}, user], tools=False),
        "short_ids": bool(calls) and not rendered(templates, [long_id]),
    }


def _whole(templates: Templates, messages: Sequence[Mapping[str, Any]], *, tools: bool) -> str:
    offered = [tool.as_openai() for tool in marked_tools().values()] if tools else None
    try:
        return templates.render_chat(messages, tools=offered, add_generation_prompt=True)
    except MLXInferError:
        return ""
