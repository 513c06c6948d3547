"""What an answer in a chat is held to, all of it together."""

from __future__ import annotations

from dataclasses import dataclass

from ..output_format.format import OutputFormat
from ..structure import Structure
from ..tools import ToolChoice, Tools
from .constraint import Constraint
from .grammar import GrammarCompiler
from .phases import CallsInText, Reasoning
from .tool_grammar import ToolGrammars
from .vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """What a chat asks of its answer."""

    output_format: OutputFormat
    """How the model writes reasoning and calls."""
    tools: Tools
    """What may be called."""
    choice: ToolChoice
    """Whether the model may, must or must not call."""
    begun: str
    """The end of the prompt, which may have begun the reasoning or a call."""
    structure: Structure | None
    """What the answer is held to; with tools that may be called, it is either calls or this."""
    budget: int | None
    """Tokens of reasoning at most."""

    def constraint(self, compiler: GrammarCompiler, vocab_size: int) -> Constraint | None:
        """None where the answer is free. `vocab_size`: logits of the model. Raises `PromptError` and `SamplingError` for what cannot be
        held."""
        vocabulary, reasoning = Vocabulary.of(compiler, vocab_size), self.output_format.reasoning
        written = "" if self.output_format.calls is None else _common(self.begun.rstrip(), self.output_format.calls.begin)
        first = self._after_reasoning(compiler, vocabulary, written)
        if reasoning is None or (first is None and self.budget is None):
            return first
        begin, end = reasoning.begin.strip(), reasoning.end.strip()
        if self.begun.rfind(end) > self.begun.rfind(begin):
            return first
        after = self._after_reasoning(compiler, vocabulary, "") if written else first
        begun = self.begun.rstrip().endswith(begin)
        return Reasoning(vocabulary, begin, end, after, first=first, budget=self.budget, begun=begun)

    def _after_reasoning(self, compiler: GrammarCompiler, vocabulary: Vocabulary, written: str) -> Constraint | None:
        """What the answer itself is held to. `written`: what the prompt has of the beginning of a call."""
        calls, choice, tools = self.output_format.calls, self.choice, self.tools
        if calls is None or not tools or choice.mode == "none":
            return None if self.structure is None else compiler.compile(self.structure)
        grammars = ToolGrammars.of(compiler)
        if choice.mode == "required":
            callable_tools = tools if choice.name is None else {choice.name: tools[choice.name]}
            return grammars.compile(calls, callable_tools, parallel=choice.parallel, written=written).constraint.copy()
        if self.structure is not None:
            return grammars.compile(calls, tools, parallel=choice.parallel, structure=self.structure).constraint.copy()
        grammar = grammars.compile(calls, tools, parallel=choice.parallel, free=True)
        return CallsInText(vocabulary, grammar, parallel=choice.parallel and calls.parallel)


def _common(text: str, mark: str) -> str:
    """What `text` ends with and `mark` begins with."""
    return next((mark[:size] for size in range(min(len(mark), len(text)), 0, -1) if text.endswith(mark[:size])), "")
