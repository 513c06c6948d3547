"""Finds out how a model writes reasoning and calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from ..errors import SettingError
from ..tokenizer.tokenizer import Tokenizer
from .format import HERMES, CallFormat, OutputEvent, OutputFormat
from .from_template import KEYS, NAMES, Bounded, Templates, calls_message, calls_of_template, knows, marked_tools, rendered, typed_anyhow
from .reasoning import reasoning_in
from .response_template import read_response_template
from .table import FAMILIES, Family, family_of, hidden_of_template

_known: WeakKeyDictionary[Tokenizer, dict[str | None, OutputFormat]] = WeakKeyDictionary()
_lock = Lock()


def output_format(tokenizer: Tokenizer, chosen: str | None = None, response_template: Mapping[str, Any] | None = None) -> OutputFormat:
    """How this model writes its answers: as `chosen` (a name of `FAMILIES`) says, as the checkpoint's `response_template` does, as its chat
    template renders calls, as a table of families has it, or else the described form. Found out once for a tokenizer; renders the chat
    template some ten times. Raises `SettingError` for a name that there is not, and nothing else."""
    check_format_name(chosen)
    with _lock:
        known = _known.setdefault(tokenizer, {})
        if chosen not in known:
            ends = [tokenizer.decode([token_id], skip_special_tokens=False) for token_id in tokenizer.eos_token_ids]
            known[chosen] = derived(tokenizer, chosen, response_template, ends)
        return known[chosen]


def check_format_name(chosen: str | None) -> None:
    """Raise `SettingError` for a name of a format that there is not."""
    if chosen is not None and chosen not in FAMILIES:
        raise SettingError(f"there is no tool format {chosen!r}: use one of {', '.join(sorted(FAMILIES))}")


def derived(
    templates: Templates, chosen: str | None = None, response_template: Mapping[str, Any] | None = None, ends: Sequence[str] = ()
) -> OutputFormat:
    """As `output_format`, not remembered. `ends` are the texts of tokens that end an answer."""
    source = templates.chat_template or ""
    found = OutputFormat(None, HERMES, "described", tools_in_template=False, calls_in_template=False, results_in_template=False)
    declared = read_response_template(response_template) if response_template is not None else None
    if source:
        found = _from_template(Bounded(templates), source, ends)
    if declared is not None and declared.reasoning is not None:
        found = replace(found, reasoning=declared.reasoning)
    if chosen is not None:
        return _with_family(found, FAMILIES[chosen], "option")
    if declared is not None and declared.calls is not None:
        return replace(found, calls=declared.calls, also=(), source="response_template")
    return found


def _from_template(templates: Templates, source: str, ends: Sequence[str]) -> OutputFormat:
    first = family_of(source, first=True)
    read_off = calls_of_template(templates, ends)
    as_text = read_off is not None and read_off[1]
    facts = knows(templates, as_text)
    reasoning = reasoning_in(source + rendered(templates, [], prompt=True, tools=False))
    found = OutputFormat(reasoning, HERMES, "described", arguments_as_text=as_text, hidden=hidden_of_template(source), **facts)
    if first is not None:
        return _with_family(found, first, "table")
    if read_off is not None and (calls := _that_reads_back(templates, found, read_off[0])) is not None:
        return replace(found, calls=calls, source="chat template")
    family = family_of(source, first=False)
    return found if family is None else _with_family(found, family, "table")


def _with_family(found: OutputFormat, family: Family, source: str) -> OutputFormat:
    return replace(
        found,
        calls=family.calls,
        also=family.also,
        source=source,
        reasoning=family.reasoning or found.reasoning,
        hidden=tuple(dict.fromkeys((*found.hidden, *family.hidden))),
        answer=family.answer,
    )


_TRIALS: tuple[dict[str, Any], ...] = (
    {KEYS[0]: "a b"},
    {KEYS[0]: 'line\n "quoted" <b>', KEYS[1]: -5},
    {KEYS[1]: 0, KEYS[0]: "ünï 🦊", "keyObject": {"q": [1, {"r": "s"}]}},
)


def _that_reads_back(templates: Templates, found: OutputFormat, calls: CallFormat) -> CallFormat | None:
    """The first of a few readings by which the reader gets out of rendered calls what went into them. One that fails for nested objects
    only is taken if there is no better one: models write what their template does."""
    readings = [calls, *([typed_anyhow(calls)] if calls.key_end_json else [])]
    for trials in (_TRIALS, _TRIALS[:2]):
        for reading in readings:
            if _reads_back(templates, replace(found, calls=reading), trials):
                return reading
    return None


def _reads_back(templates: Templates, found: OutputFormat, trials: Sequence[dict[str, Any]]) -> bool:
    assert found.calls is not None
    chats = [[(NAMES[0], trial)] for trial in trials]
    if found.calls.parallel:
        chats.append([(NAMES[i % 2], trial) for i, trial in enumerate(trials)])
    return all(read_calls(found, answer_of(templates, found, calls)) == calls for calls in chats)


def answer_of(templates: Templates, found: OutputFormat, calls: Sequence[tuple[str, Any]]) -> tuple[str, str]:
    """(the prompt's end, the answer) with these calls of marked tools, as the template renders them."""
    prompt = rendered(templates, [], prompt=True)
    text = rendered(templates, [calls_message(calls, as_text=found.arguments_as_text)])
    if text.startswith(prompt):
        return prompt, text[len(prompt) :]
    return "", text


def read_calls(found: OutputFormat, answer: tuple[str, str]) -> list[tuple[str, Any]]:
    """The complete calls of marked tools in an answer."""
    reader = found.reader(marked_tools(), answer[0], bare=False)
    return collected([*reader.add(answer[1]), *reader.finish()])


def collected(events: Sequence[OutputEvent]) -> list[tuple[str, Any]]:
    """(name, arguments) of every complete call among these events."""
    calls, name, text = [], "", ""
    for event in events:
        if event.kind == "call_begin":
            name, text = event.text, ""
        elif event.kind == "arguments":
            text += event.text
        elif event.kind == "call_end":
            calls.append((name, json.loads(text)))
    return calls
