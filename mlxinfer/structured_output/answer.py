"""What an answer in a chat is held to, all of it together."""

from __future__ import annotations

from ..output_format.format import OutputFormat
from ..structure import Structure
from ..tools import ToolChoice, Tools
from .constraint import Constraint
from .grammar import GrammarCompiler
from .phases import CallsInText, Reasoning
from .tool_grammar import ToolGrammars
from .vocabulary import Vocabulary


def answer_constraint(
    compiler: GrammarCompiler,
    output_format: OutputFormat,
    tools: Tools,
    choice: ToolChoice,
    begun: str,
    structure: Structure | None,
    budget: int | None,
) -> Constraint | None:
    """None where the answer is free. `begun`: the end of the prompt, which may have begun the reasoning. With tools that may be called and
    a structure, the answer is either. Raises `PromptError` and `SamplingError` for what cannot be held."""
    calls_begin = "" if output_format.calls is None else output_format.calls.begin
    written = _common(begun.rstrip(), calls_begin)
    first = _held(compiler, output_format, tools, choice, structure, written)
    reasoning = output_format.reasoning
    if reasoning is None or (first is None and budget is None):
        return first
    begin, end = reasoning.begin.strip(), reasoning.end.strip()
    last_begin, last_end = begun.rfind(begin), begun.rfind(end)
    if last_end > last_begin:
        return first
    thinks = begun.rstrip().endswith(begin)
    after = _held(compiler, output_format, tools, choice, structure, "") if written else first
    return Reasoning(Vocabulary.of(compiler), begin, end, after, first=first, budget=budget, begun=thinks)


def _common(text: str, mark: str) -> str:
    """What `text` ends with and `mark` begins with."""
    return next((mark[:size] for size in range(min(len(mark), len(text)), 0, -1) if text.endswith(mark[:size])), "")


def _held(
    compiler: GrammarCompiler, output_format: OutputFormat, tools: Tools, choice: ToolChoice, structure: Structure | None, written: str
) -> Constraint | None:
    """What the answer itself is held to. `written`: what the prompt has of the beginning of a call."""
    calls = _calls(compiler, output_format, tools, choice, structure, written)
    return compiler.compile(structure) if calls is None and structure is not None else calls


def _calls(
    compiler: GrammarCompiler, output_format: OutputFormat, tools: Tools, choice: ToolChoice, structure: Structure | None, written: str
) -> Constraint | None:
    """What calls are held to, if there may be any."""
    calls = output_format.calls
    if calls is None or not tools or choice.mode == "none":
        return None
    grammars = ToolGrammars.of(compiler)
    if choice.mode == "required":
        callable_tools = tools if choice.name is None else {choice.name: tools[choice.name]}
        return grammars.compile(calls, callable_tools, parallel=choice.parallel, written=written).constraint.copy()
    if structure is not None:
        return grammars.compile(calls, tools, parallel=choice.parallel, structure=structure).constraint.copy()
    grammar = grammars.compile(calls, tools, parallel=choice.parallel, free=True)
    return CallsInText(Vocabulary.of(compiler), grammar, parallel=choice.parallel and calls.parallel)
