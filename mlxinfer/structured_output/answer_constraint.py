"""Constraint of a chat answer: reasoning, tool calls and structure combined."""

from __future__ import annotations

from dataclasses import dataclass

from ..output_format.format import OutputFormat
from ..structure import Structure
from ..tools import ToolChoice, Tools
from .constraint import Constraint
from .grammar import GrammarCompiler
from .phase_constraints import CallsInText, Preamble, Reasoning
from .tool_grammar import ToolGrammars
from .vocabulary import GrammarVocabulary


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """Requirements of a chat on its answer."""

    output_format: OutputFormat
    """Format of reasoning and calls."""
    tools: Tools
    choice: ToolChoice
    """Choice of the caller: calls are allowed, required or forbidden."""
    begun: str
    """End of the prompt, which may have opened the reasoning or a call."""
    structure: Structure | None
    """Structure of the answer; with callable tools the answer is either calls or this structure."""
    budget: int | None
    """Maximum number of reasoning tokens; None for no limit."""

    def constraint(self, compiler: GrammarCompiler, vocab_size: int) -> Constraint | None:
        """Return the constraint over `vocab_size` logits; None if the answer is free.

        Raises `PromptError` and `SamplingError` for requirements that are not supported.
        """
        vocabulary, reasoning = GrammarVocabulary.of(compiler, vocab_size), self.output_format.reasoning
        first = self._after_reasoning(compiler, vocabulary, self.begun.rstrip())
        if reasoning is None or (first is None and self.budget is None):
            return first
        begin, end = reasoning.begin.strip(), reasoning.end.strip()
        begun, ended = self.begun.rstrip(), self.begun.rfind(end)
        if begun.endswith(end) or -1 < self.begun.rfind(begin) < ended:  # otherwise the end belongs to an earlier message
            return first
        literals = (self.output_format.answer, "" if self.output_format.calls is None else self.output_format.calls.begin)
        after = self._after_reasoning(compiler, vocabulary, "") if any(_common(begun, literal) for literal in literals) else first
        spaced, thinks = not self.output_format.answer, begun.endswith(begin)
        return Reasoning(vocabulary, begin, end, after, first=first, budget=self.budget, begun=thinks, spaced=spaced)

    def _after_reasoning(self, compiler: GrammarCompiler, vocabulary: GrammarVocabulary, begun: str) -> Constraint | None:
        """Return the constraint after the reasoning. `begun` is the text before it, perhaps the start of a call or of the answer."""
        calls, choice, tools, header = self.output_format.calls, self.choice, self.tools, self.output_format.answer
        header = header[len(_common(begun, header)) :]
        if calls is None or not tools or choice.mode == "none":
            if self.structure is None:
                return None
            held = compiler.compile(self.structure)
            return Preamble(vocabulary, vocabulary.tokens_of(header), held) if header else held
        written = _common(begun, calls.begin)
        grammars = ToolGrammars.of(compiler)
        if choice.mode == "required":
            callable_tools = tools if choice.name is None else {choice.name: tools[choice.name]}
            return grammars.compile(calls, callable_tools, parallel=choice.parallel, written=written).constraint.copy()
        if self.structure is not None:
            either = grammars.compile(calls, tools, parallel=choice.parallel, written=written, structure=self.structure, header=header)
            return either.constraint.copy()
        grammar = grammars.compile(calls, tools, parallel=choice.parallel, free=True)
        return CallsInText(vocabulary, grammar, parallel=choice.parallel and calls.parallel)


def _common(text: str, mark: str) -> str:
    """Return the longest suffix of `text` that is a prefix of `mark`."""
    return next((mark[:size] for size in range(min(len(mark), len(text)), 0, -1) if text.endswith(mark[:size])), "")
