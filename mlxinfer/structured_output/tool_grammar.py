"""Grammars of the offered tools' calls, in the model's format."""

from __future__ import annotations

import json
import logging
import re
from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, proxy

from ..errors import PromptError, SamplingError
from ..output_format.format import CallFormat
from ..structure import JSON_OBJECT, Choice, Lark, Regex, Schema, Structure
from ..tools import Tool, Tools
from .constraint import GrammarConstraint
from .gbnf import quoted
from .grammar import GrammarCompiler, as_lark_regex
from .grammar_rules import GrammarRules, escaped
from .schema import MAX_DEPTH, normalized
from .value_grammar import ArgumentRules, UnsupportedArgumentError

_KEPT = 64
_SHORT, _SHORTEST = 6, 3
"""Lengths of a call's opening literal. Below `_SHORT`, only the literal with a tool's name starts a call; below `_SHORTEST`, only at the
start of the content."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """Constraint of calls, and the texts that start them."""

    constraint: GrammarConstraint
    """Initial state, to be copied."""
    triggers: tuple[bytes, ...]
    """Texts that start a call, special tokens spelled out."""
    at_start: bool
    """True if triggers count only at the start of the content."""


class ToolGrammars:
    """Cache of the grammars of one model's tools. Thread-safe."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._lock = Lock()
        self._kept: OrderedDict[Any, CallGrammar] = OrderedDict()
        tokenizer = compiler.tokenizer
        self._special_tokens = {tokenizer.token_text(i): i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)}
        self._special_tokens.pop("", None)

    @classmethod
    def of(cls, compiler: GrammarCompiler) -> ToolGrammars:
        """Return the grammars of a compiler, created once."""
        with _lock:
            found = _grammars.get(compiler)
            if found is None:
                found = _grammars[compiler] = cls(proxy(compiler))  # a reference to its key would keep the entry alive
            return found

    def compile(
        self,
        calls: CallFormat,
        tools: Tools,
        *,
        parallel: bool,
        free: bool = False,
        written: str = "",
        structure: Structure | None = None,
        header: str = "",
    ) -> CallGrammar:
        """Return the grammar of one call or, with `parallel`, of one or more.

        With `free`, calls follow free text that may run into them. `written` is the part of the first call's opening that the prompt has.
        With a `structure`, the answer is either calls or `header` and the structure. Raises `PromptError` for a strict tool whose schema is
        not supported, `SamplingError` for a structure.
        """
        texts = tuple((tool.name, tool.strict, tool.parameters.text) for tool in tools.values())
        key = (calls, texts, parallel, free, written, structure, header)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made = self._compiled(calls, tools, parallel=parallel, free=free, written=written, structure=structure, header=header)
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return made

    def _compiled(
        self, calls: CallFormat, tools: Tools, *, parallel: bool, free: bool, written: str, structure: Structure | None, header: str
    ) -> CallGrammar:
        if structure is not None:
            self._compiler.compile(structure)  # raises its own error
        loose = self._loose(calls, tools, compiled=False)
        for _ in range(2):
            rules = GrammarRules(self._special_tokens)
            writer = _CallWriter(rules, calls, loose)
            start = writer.answer(tools, parallel=parallel and calls.parallel, free=free, written=written)
            if structure is not None:
                start = f"{rules.rule(start)} | {rules.literal(header)} {_structure(rules, structure)}"
            try:
                constraint = self._compiler.compile(Lark(rules.grammar(start)), own=True)
            except SamplingError as error:
                found = self._loose(calls, tools, compiled=True)
                if found <= loose:
                    if structure is None:
                        raise PromptError(f"tools: their schemas cannot be held together: {_fault_text(error)}") from None
                    raise
                loose |= found
            else:
                return CallGrammar(constraint, writer.triggers(tools), writer.at_start)
        raise PromptError("tools: their schemas cannot be held together")

    def _loose(self, calls: CallFormat, tools: Tools, *, compiled: bool) -> set[str]:
        """Return the tools with unsupported schemas, with `compiled` also those that fail only to compile.

        Raises `PromptError` for a strict tool.
        """
        loose = set()
        for name, tool in tools.items():
            fault = self._fault(calls, tool, compiled=compiled)
            if fault and tool.strict:
                raise PromptError(f"tools: {name}: its schema cannot be held, which strict asks for: {fault}")
            if fault:
                _log.warning("tool %s: its schema cannot be held (%s), so its arguments may be any JSON object", name, fault)
                loose.add(name)
        return loose

    def _fault(self, calls: CallFormat, tool: Tool, *, compiled: bool) -> str:
        """Return the reason why a tool's schema is not supported, or ""."""
        rules = GrammarRules(self._special_tokens)
        try:
            start = _CallWriter(rules, calls, set(), exact=True).call(tool)
            if compiled:
                self._compiler.compile(Lark(rules.grammar(start)), own=True)
        except (UnsupportedArgumentError, SamplingError) as error:
            return _fault_text(error)
        except RecursionError:
            return f"it is nested more than {MAX_DEPTH} deep"
        return ""


def _fault_text(error: Exception) -> str:
    """Return an error's text without positions in the generated grammar."""
    found = re.sub(r"^structure: |grammar: |at \d+\(\d+\): |failed to compile JSON schema: ", "", str(error))
    return re.split(r"\s+\d+ \| ", found)[0]


_grammars: WeakKeyDictionary[GrammarCompiler, ToolGrammars] = WeakKeyDictionary()
_lock = Lock()


class _CallWriter:
    """Writes the rules of calls in one format; `loose` tools accept any JSON object as arguments."""

    def __init__(self, rules: GrammarRules, calls: CallFormat, loose: set[str], *, exact: bool = False) -> None:
        self._rules = rules
        self._calls = calls
        self._loose = loose
        self._exact = exact
        self.at_start = len(calls.begin.strip()) < _SHORTEST
        """See `CallGrammar`."""

    def triggers(self, tools: Tools) -> tuple[bytes, ...]:
        """See `CallGrammar`."""
        calls = self._calls
        if len(calls.begin.strip()) >= _SHORT:
            return (calls.begin.split("{id}")[0].strip().encode(),)
        if calls.kind == "object":
            key = json.dumps(calls.name_key)
            return tuple(f"{calls.begin.strip()}{{{key}: {json.dumps(name, ensure_ascii=False)}".encode() for name in tools)
        return tuple((calls.begin.strip() + name + calls.name_end.strip()).encode() for name in tools)

    def answer(self, tools: Tools, *, parallel: bool, free: bool, written: str = "") -> str:
        """Return all calls (`free`, `written`: see `ToolGrammars.compile`). With `free`, a call without a section ends it."""
        rules, calls = self._rules, self._calls
        body = rules.one_of([self._after_begin(tool) for tool in tools.values()])
        begin = self._free_begin() if free else rules.literal(calls.begin[len(written) :])
        if free and not calls.section_begin and not self.at_start:
            return f"{begin} {body} {rules.literal(calls.section_end)}"
        further = f"({rules.literal(calls.next)} {body})*" if parallel else ""
        if parallel and not calls.next:
            further = f"({rules.literal(calls.call_begin)} {body})*" if calls.call_begin else ""
        return " ".join(filter(None, [begin, body, further, rules.literal(calls.section_end)]))

    def call(self, tool: Tool) -> str:
        """Return an expression of one call."""
        return f"{self._rules.literal(self._calls.begin)} {self._after_begin(tool)}"

    def _free_begin(self) -> str:
        """Return the opening of calls, whose first token may start with other text."""
        rules, begin = self._rules, self._calls.begin
        if self.at_start:
            return f"/\\s{{0,8}}/ {rules.literal(begin)}"
        parts = rules.split(begin.lstrip())
        if not isinstance(parts[0], str):
            return rules.literal(begin.lstrip())
        # Without its trailing whitespace, so that a token with whitespace and more text is constrained already.
        first = parts[0].rstrip() if len(parts) == 1 else parts[0]
        head = rules.rule(f"/(?s:.*){escaped(first)}/", lazy=True)
        return f"{head} {rules.literal(begin.lstrip()[len(first) :])}"

    def _after_begin(self, tool: Tool) -> str:
        """Return an expression of name, arguments and end of a call."""
        rules, calls = self._rules, self._calls
        end = rules.literal(calls.call_end)
        if calls.kind == "object":
            name = f"{{{json.dumps(calls.name_key)}: {json.dumps(tool.name, ensure_ascii=False)}, {json.dumps(calls.arguments_key)}: "
            return rules.rule(f'{quoted(name)} {self._json(tool)} "}}" {end}')
        name = f"{quoted(tool.name)} {rules.literal(calls.name_end)}"
        if calls.kind == "json":
            return rules.rule(f"{name} {self._json(tool)} {end}")
        schema = {"type": "object", "properties": _any_of_each(tool)} if tool.name in self._loose else normalized(tool.parameters.schema)
        arguments = ArgumentRules(rules, calls, schema, exact=self._exact).arguments()
        return rules.rule(f"{name} {arguments} {end}")

    def _json(self, tool: Tool) -> str:
        schema = JSON_OBJECT.schema if tool.name in self._loose else normalized(tool.parameters.schema)
        return self._rules.json({**schema, "type": "object"} if isinstance(schema, dict) else JSON_OBJECT.schema)


def _any_of_each(tool: Tool) -> dict[str, Any]:
    """Return the properties of an unsupported schema, each with any value."""
    schema = tool.parameters.schema
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return {key: {} for key in properties} if isinstance(properties, dict) else {}


def _structure(rules: GrammarRules, structure: Structure) -> str:
    """Return a structure as an alternative of a grammar."""
    if isinstance(structure, Schema):
        return rules.json(normalized(structure.schema) if isinstance(structure.schema, dict) else {})
    if isinstance(structure, Regex):
        return rules.rule(f"/{as_lark_regex(structure.pattern)}/")
    if isinstance(structure, Choice):
        return rules.text_of(structure.options)
    raise SamplingError('structure: a grammar cannot be combined with tools: leave one out, or set tool_choice to "none"')
