"""How a model writes its answers in chats: a frozen value from which the reader, the grammar and the history are made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from ..tools import Tools
    from .reader import OutputReader

EventKind = Literal["reasoning", "content", "call_begin", "arguments", "call_end"]


class OutputEvent(NamedTuple):
    """A piece of an answer."""

    kind: EventKind
    """What the text is part of. A "call_begin" is followed by that call's "arguments" and its "call_end"; without "call_end" the call
    broke off."""
    text: str
    """The text of "reasoning" and "content"; the tool's name with "call_begin", JSON text with "arguments", nothing with "call_end"."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """What reasoning stands between. Whitespace inside and after these is not part of the answer."""

    begin: str
    """As "<think>"."""
    end: str
    """As "</think>"."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How calls of tools are written, as literals around names, arguments and values.

    `section_begin (call (separator call)*) section_end`, where a call is, by `kind`:

    - "object": `call_begin {"NAME_KEY": "NAME", "ARGUMENTS_KEY": {...}} call_end`, whitespace and the order of keys free;
    - "json": `call_begin NAME name_end {...} call_end`;
    - "tagged": `call_begin NAME name_end (key_begin KEY key_end VALUE value_end)* call_end`: texts as they are, other values as JSON;
    - "gemma": as "json", but keys are bare, and texts stand between `quote`s without escapes: `{city:<|"|>Paris<|"|>,days:3}`;
    - "pythonic": `call_begin NAME( key='text', other=[1, True, None] ) call_end`, values as Python writes them; `name_end` is "(" and
      `call_end` begins with ")".

    In a literal, "{id}" stands for a call's id or number, which means nothing, and "{key}" for the argument's name. The reader takes any
    whitespace, or none, where a literal has some, except around the values of "tagged".
    """

    kind: Literal["object", "json", "tagged", "gemma", "pythonic"]
    """Which of the shapes above."""
    call_begin: str = ""
    """Before the object or the name; may be empty."""
    call_end: str = ""
    """After the arguments (for "object": after the closing brace); may be empty."""
    section_begin: str = ""
    """Before the first call."""
    section_end: str = ""
    """After the last call."""
    separator: str = ""
    """Between calls."""
    name_end: str = ""
    """Between name and arguments. Unused by "object"."""
    name_key: str = "name"
    """For "object": the key of the name."""
    arguments_key: str = "arguments"
    """For "object": the key of the arguments."""
    key_begin: str = ""
    """For "tagged": before an argument's name."""
    key_end: str = ""
    """For "tagged": between an argument's name and its value, if that is a text; for any value where `key_end_json` is empty."""
    key_end_json: str = ""
    """For "tagged": between an argument's name and a value that is not a text, where that is written otherwise."""
    value_end: str = ""
    """For "tagged": after a value."""
    quote: str = ""
    """For "gemma": stands on both sides of a text."""
    parallel: bool = True
    """Whether there can be more than one call."""

    @property
    def begin(self) -> str:
        """What the first call begins with, up to its name or, for "object", its opening brace."""
        return self.section_begin + self.call_begin

    @property
    def next(self) -> str:
        """What stands between two calls: from after `call_end` up to the next name or opening brace."""
        return self.separator + self.call_begin


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How a model writes reasoning and calls, and what its chat template knows of them."""

    reasoning: ReasoningFormat | None
    """What reasoning stands between; None for a model that writes none."""
    calls: CallFormat | None
    """How it is to write calls. Never None after `output_format`: models without a form of their own get the described one."""
    source: str
    """Where `calls` comes from: "option", "response_template", "chat template", "table" or "described"."""
    tools_in_template: bool = True
    """Whether the chat template tells the model of tools; otherwise they are described in the system message."""
    calls_in_template: bool = True
    """Whether the chat template writes earlier calls; otherwise they are written into their message's content."""
    results_in_template: bool = True
    """Whether the chat template knows the role "tool"; otherwise results are user messages."""
    system_in_template: bool = True
    """Whether the chat template takes a system message; otherwise the first user message begins with the description of tools."""
    arguments_as_text: bool = False
    """Whether the chat template takes the arguments of earlier calls as JSON text rather than as an object."""
    short_ids: bool = False
    """Whether the chat template refuses ids of calls that are not nine letters and digits, as Mistral's do."""
    also: tuple[CallFormat, ...] = ()
    """Other spellings of calls that are read but never asked for."""
    hidden: tuple[str, ...] = ()
    """Literals around content that are no part of it, as `<|START_RESPONSE|>`."""

    answer: str = ""
    """What a model writes before an answer that is no call, as `<|channel|>final<|message|>`, where it has to be written."""

    def reader(self, tools: Tools, begun: str = "", *, bare: bool = True, parallel: bool = True) -> OutputReader:
        """What tells one answer's parts apart. `tools` are the offered ones: nothing else is taken for a call. `begun` is the end of the
        rendered prompt, which may have opened reasoning. `bare`: calls as plain JSON are read too, whatever the format; without `parallel`
        one of them at most."""
        from .reader import OutputReader

        return OutputReader(self, tools, begun, bare=bare, parallel=parallel)

    def literals(self) -> Iterator[str]:
        """Every fixed text that may have special tokens in it."""
        if self.reasoning is not None:
            yield from (self.reasoning.begin, self.reasoning.end)
        yield from self.hidden
        yield self.answer
        for calls in filter(None, (self.calls, *self.also)):
            yield from (calls.begin, calls.next, calls.section_end, calls.call_end, calls.name_end)
            yield from (calls.key_begin, calls.key_end, calls.key_end_json, calls.value_end, calls.quote)


HERMES = CallFormat("object", call_begin="<tool_call>\n", call_end="\n</tool_call>", separator="\n")
"""The described form, and that of Hermes and Qwen."""
