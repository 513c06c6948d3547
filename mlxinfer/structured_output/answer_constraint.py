"""What an answer in a chat is held to, all of it together."""

from __future__ import annotations

from dataclasses import dataclass

from ..output_format.format import OutputFormat
from ..structure import Structure
from ..tools import ToolChoice, Tools
from .constraint import Constraint
from .grammar import GrammarCompiler
from .phase_constraints import CallsInText, Preamble, Reasoning
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
        first = self._after_reasoning(compiler, vocabulary, self.begun.rstrip())
        if reasoning is None or (first is None and self.budget is None):
            return first
        begin, end = reasoning.begin.strip(), reasoning.end.strip()
        begun, ended = self.begun.rstrip(), self.begun.rfind(end)
        if begun.endswith(end) or -1 < self.begun.rfind(begin) < ended:  # any other end is that of an earlier message
            return first
        literals = (self.output_format.answer, "" if self.output_format.calls is None else self.output_format.calls.begin)
        after = self._after_reasoning(compiler, vocabulary, "") if any(_common(begun, literal) for literal in literals) else first
        spaced, thinks = not self.output_format.answer, begun.endswith(begin)
        return Reasoning(vocabulary, begin, end, after, first=first, budget=self.budget, begun=thinks, spaced=spaced)

    def _after_reasoning(self, compiler: GrammarCompiler, vocabulary: Vocabulary, begun: str) -> Constraint | None:
        """What the answer itself is held to. `begun`: the text before it, which may be the beginning of a call, or of the answer."""
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
    """What `text` ends with and `mark` begins with."""
    return next((mark[:size] for size in range(min(len(mark), len(text)), 0, -1) if text.endswith(mark[:size])), "")
