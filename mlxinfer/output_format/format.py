"""Format of a model's chat answers: reasoning, content and tool calls. The reader, the grammar and the history are built from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

EventKind = Literal["reasoning", "content", "call_begin", "arguments", "call_end"]


class OutputEvent(NamedTuple):
    """A piece of an answer."""

    kind: EventKind
    """Part of the answer. "call_begin" is followed by "arguments" and "call_end"; without "call_end" the call was cut off."""
    text: str
    """Text of "reasoning" and "content", the tool's name for "call_begin", JSON text for "arguments", "" for "call_end"."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Literals around reasoning. Whitespace inside and after them is not part of the answer."""

    begin: str
    """For example "<think>"."""
    end: str
    """For example "</think>"."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Spelling of tool calls: literals around names, arguments and values.

    An answer with calls is `section_begin (call (separator call)*) section_end`. A call depends on `kind`:

    - "object": `call_begin {"NAME_KEY": "NAME", "ARGUMENTS_KEY": {...}} call_end`, with any whitespace and order of keys;
    - "json": `call_begin NAME name_end {...} call_end`;
    - "tagged": `call_begin NAME name_end (key_begin KEY key_end VALUE value_end)* call_end`, with raw texts and other values as JSON;
    - "gemma": as "json", but with bare keys, and texts between `quote`s without escapes: `{city:<|"|>Paris<|"|>,days:3}`;
    - "pythonic": `call_begin NAME( key='text', other=[1, True, None] ) call_end`, with Python literals as values. `name_end` is "(" and
      `call_end` starts with ")".

    In a literal, "{id}" is a placeholder for a call's id or number, which is ignored, and "{key}" for the argument's name. Where a literal
    has whitespace the reader accepts any amount, including zero, except around the values of "tagged".
    """

    kind: Literal["object", "json", "tagged", "gemma", "pythonic"]
    """One of the shapes above."""
    call_begin: str = ""
    """Literal before the object or the name; may be empty."""
    call_end: str = ""
    """Literal after the arguments, or after the closing brace of an "object"; may be empty."""
    section_begin: str = ""
    """Literal before the first call."""
    section_end: str = ""
    """Literal after the last call."""
    separator: str = ""
    """Literal between two calls."""
    name_end: str = ""
    """Literal between name and arguments; unused by "object"."""
    name_key: str = "name"
    """Key of the name, for "object"."""
    arguments_key: str = "arguments"
    """Key of the arguments, for "object"."""
    key_begin: str = ""
    """Literal before an argument's name, for "tagged"."""
    key_end: str = ""
    """Literal between an argument's name and a text value, for "tagged"; used for every value if `key_end_json` is empty."""
    key_end_json: str = ""
    """Literal between an argument's name and a value that is not a text, for "tagged", if it differs from `key_end`."""
    value_end: str = ""
    """Literal after a value, for "tagged"."""
    quote: str = ""
    """Literal on both sides of a text, for "gemma"."""
    parallel: bool = True
    """True if an answer may have more than one call."""

    @property
    def begin(self) -> str:
        """Literals before the first call's name or, for "object", its opening brace."""
        return self.section_begin + self.call_begin

    @property
    def next(self) -> str:
        """Literals between two calls: from after `call_end` to the next name or opening brace."""
        return self.separator + self.call_begin


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """Format of reasoning and calls, and the parts of a chat that the chat template supports."""

    reasoning: ReasoningFormat | None
    """Literals around reasoning; None for a model that does not reason."""
    calls: CallFormat | None
    """Spelling of calls. `output_format` never leaves it None: models without a native form get the described one."""
    source: str
    """Origin of `calls`: "option", "response_template", "chat template", "table" or "described"."""
    tools_in_template: bool = True
    """True if the chat template lists the tools; otherwise the system message describes them."""
    calls_in_template: bool = True
    """True if the chat template renders earlier calls; otherwise they are written into the message's content."""
    results_in_template: bool = True
    """True if the chat template supports the role "tool"; otherwise results become user messages."""
    system_in_template: bool = True
    """True if the chat template accepts a system message; otherwise the first user message starts with the tools' description."""
    arguments_as_text: bool = False
    """True if the chat template expects the arguments of earlier calls as JSON text, not as an object."""
    short_ids: bool = False
    """True if the chat template accepts only call ids of nine letters and digits, as Mistral's does."""
    also: tuple[CallFormat, ...] = ()
    """Other spellings of calls that the reader accepts; the model is never asked for them."""
    hidden: tuple[str, ...] = ()
    """Literals around content that do not belong to it, for example `<|START_RESPONSE|>`."""
    answer: str = ""
    """Literal that must precede an answer without a call, for example `<|channel|>final<|message|>`."""

    def literals(self) -> Iterator[str]:
        """Yield every fixed text that may contain special tokens."""
        if self.reasoning is not None:
            yield from (self.reasoning.begin, self.reasoning.end)
        yield from self.hidden
        yield self.answer
        for calls in filter(None, (self.calls, *self.also)):
            yield from (calls.begin, calls.next, calls.section_end, calls.call_end, calls.name_end)
            yield from (calls.key_begin, calls.key_end, calls.key_end_json, calls.value_end, calls.quote)


HERMES = CallFormat("object", call_begin="<tool_call>\n", call_end="\n</tool_call>", separator="\n")
"""The described form; Hermes and Qwen use it natively."""
