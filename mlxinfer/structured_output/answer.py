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
    after = _calls(compiler, output_format, tools, choice, structure)
    if after is None and structure is not None:
        after = compiler.compile(structure)
    reasoning = output_format.reasoning
    if reasoning is None or (after is None and budget is None):
        return after
    begin, end = reasoning.begin.strip(), reasoning.end.strip()
    last_begin, last_end = begun.rfind(begin), begun.rfind(end)
    if last_end > last_begin:
        return after
    thinks = begun.rstrip().endswith(begin)
    return Reasoning(Vocabulary.of(compiler), begin, end, after, budget=budget, begun=thinks)


def _calls(
    compiler: GrammarCompiler, output_format: OutputFormat, tools: Tools, choice: ToolChoice, structure: Structure | None
) -> Constraint | None:
    """What calls are held to, if there may be any."""
    calls = output_format.calls
    if calls is None or not tools or choice.mode == "none":
        return None
    grammars = ToolGrammars.of(compiler)
    if choice.mode == "required":
        callable_tools = tools if choice.name is None else {choice.name: tools[choice.name]}
        return grammars.compile(calls, callable_tools, parallel=choice.parallel).constraint.copy()
    if structure is not None:
        return grammars.compile(calls, tools, parallel=choice.parallel, structure=structure).constraint.copy()
    grammar = grammars.compile(calls, tools, parallel=choice.parallel, free=True)
    return CallsInText(Vocabulary.of(compiler), grammar, parallel=choice.parallel and calls.parallel)
