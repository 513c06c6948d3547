"""Detects the format in which a model writes reasoning and calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from ..errors import SettingError
from ..tokenizer.tokenizer import Tokenizer
from .format import HERMES, CallFormat, OutputEvent, OutputFormat, ReasoningFormat
from .from_template import KEYS, NAMES, Bounded, Templates, calls_message, calls_of_template, knows, marked_tools, rendered, typed_anyhow
from .reader import OutputReader
from .response_template import read_response_template
from .table import FAMILIES, Family, family_of, hidden_of_template

_REASONING = (
    ("<|channel|>analysis<|message|>", "<|end|>"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    ("[THINK]", "[/THINK]"),
)
_THINK_TAG = re.compile(r"</?((?:\w+:)?think(?::\w+)?)>")

_known: WeakKeyDictionary[Tokenizer, dict[str | None, OutputFormat]] = WeakKeyDictionary()
_lock = Lock()


def output_format(tokenizer: Tokenizer, chosen: str | None = None, response_template: Mapping[str, Any] | None = None) -> OutputFormat:
    """Return the output format of a model, cached per tokenizer.

    The first of these decides: `chosen` (a name of `FAMILIES`), the checkpoint's `response_template`, the calls that its chat template
    renders, the table of families, the described form. Detection renders the chat template about ten times. Raises only `SettingError`, for
    an unknown `chosen`.
    """
    check_format_name(chosen)
    with _lock:
        known = _known.setdefault(tokenizer, {})
        if chosen not in known:
            ends = [tokenizer.decode([token_id], skip_special_tokens=False) for token_id in tokenizer.eos_token_ids]
            known[chosen] = derived(tokenizer, chosen, response_template, ends)
        return known[chosen]


def check_format_name(chosen: str | None) -> None:
    """Raise `SettingError` unless `chosen` is None or a known format."""
    if chosen is not None and chosen not in FAMILIES:
        raise SettingError(f"unknown tool format {chosen!r}: use one of {', '.join(sorted(FAMILIES))}")


def derived(
    templates: Templates, chosen: str | None = None, response_template: Mapping[str, Any] | None = None, ends: Sequence[str] = ()
) -> OutputFormat:
    """Detect as `output_format` does, without its cache. `ends` are the texts of the EOS tokens."""
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
    if read_off is not None and (calls := _first_that_reads_back(templates, found, read_off[0])) is not None:
        return replace(found, calls=calls, source="chat template")
    family = family_of(source, first=False)
    return found if family is None else _with_family(found, family, "table")


def reasoning_in(text: str) -> ReasoningFormat | None:
    """Return the literals around reasoning that `text` mentions: a chat template and a prompt that it renders."""
    for begin, end in _REASONING:
        if begin in text and (end in text or begin.startswith("<|")):
            return ReasoningFormat(begin, end)
    tag = _THINK_TAG.search(text)
    return ReasoningFormat(f"<{tag[1]}>", f"</{tag[1]}>") if tag else None


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


def _first_that_reads_back(templates: Templates, found: OutputFormat, calls: CallFormat) -> CallFormat | None:
    """Return the first candidate format that reads rendered calls back unchanged; None if all fail.

    A candidate that fails only for nested objects is accepted as a last resort, because models imitate their template.
    """
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
    """Return (end of the prompt, answer) with these calls of marked tools, as the template renders them."""
    prompt = rendered(templates, [], prompt=True)
    text = rendered(templates, [calls_message(calls, as_text=found.arguments_as_text)])
    if text.startswith(prompt):
        return prompt, text[len(prompt) :]
    return "", text


def read_calls(found: OutputFormat, answer: tuple[str, str]) -> list[tuple[str, Any]]:
    """Return the complete calls of marked tools in an answer."""
    reader = OutputReader(found, marked_tools(), answer[0], bare=False)
    return collected([*reader.add(answer[1]), *reader.finish()])


def collected(events: Sequence[OutputEvent]) -> list[tuple[str, Any]]:
    """Return (name, arguments) of every complete call among `events`."""
    calls, name, text = [], "", ""
    for event in events:
        if event.kind == "call_begin":
            name, text = event.text, ""
        elif event.kind == "arguments":
            text += event.text
        elif event.kind == "call_end":
            calls.append((name, json.loads(text)))
    return calls
