"""Reasoning settings of a request: variables of the chat template, or a budget of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ...types import SamplingParams
from ..model_manager.registry import ServedModel

if TYPE_CHECKING:
    from ...engine.text.chat_prompt import ChatPrompt

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""Reasoning effort, in the words of all dialects."""

SWITCHES = ("enable_thinking", "thinking")
"""Template variables that switch reasoning on and off."""
EFFORT = "reasoning_effort"
"""Template variable for the reasoning effort."""
_COMMON: Mapping[str, str] = {"minimal": "low", "xhigh": "high", "max": "high"}
"""Replacement for an effort that a template does not know: the nearest value that all templates with this variable know."""
_SHARES: Mapping[str, float] = {"minimal": 0.1, "low": 0.2, "medium": 0.5, "high": 0.8, "xhigh": 0.95}
"""Part of an answer's tokens for reasoning, if the template has no variable for the effort. OpenRouter uses the same values."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """Reasoning settings of a request."""

    on: bool | None = None
    """True to reason; None leaves the choice to the template."""
    effort: Effort | None = None
    """Reasoning effort; "none" switches reasoning off."""
    budget: int | None = None
    """Maximum tokens of reasoning."""
    optional: bool = False
    """True if a model whose template cannot switch reasoning off may reason anyway."""

    @property
    def wanted(self) -> bool | None:
        """True to reason, from `on` and `effort`; None leaves the choice to the template."""
        if self.effort == "none":
            return False
        return True if self.on is None and self.effort is not None else self.on

    def variables(self, served: ServedModel, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Variables for the chat template: the request's own `given`, and those for `on` and `effort`. Variables that the template does
        not mention are left out."""
        known, source = served.llm.tokenizer.template_variables, served.llm.tokenizer.chat_template or ""
        found: dict[str, Any] = {} if self.wanted is None else dict.fromkeys(SWITCHES, self.wanted)
        if self.effort is not None and self.effort != "none":
            spelled = f'"{self.effort}"' in source or f"'{self.effort}'" in source
            found[EFFORT] = self.effort if spelled else _COMMON.get(self.effort, self.effort)
        return {name: value for name, value in {**found, **(given or {})}.items() if name in known}

    def held(self, params: SamplingParams, served: ServedModel, prompt: ChatPrompt) -> SamplingParams:
        """The parameters with the budget for reasoning. Models that do not reason get no budget."""
        if prompt.format.reasoning is None:
            return params
        tokens = self._tokens(served, params.max_tokens)
        return params if tokens is None else replace(params, thinking_token_budget=tokens)

    def _tokens(self, served: ServedModel, limit: int | None) -> int | None:
        """Maximum tokens of reasoning in an answer of at most `limit` tokens; None means no limit."""
        if self.budget is not None:
            return self.budget
        known = served.llm.tokenizer.template_variables
        if self.wanted is False and known.isdisjoint(SWITCHES):
            return None if self.optional else 0
        share = _SHARES.get(self.effort or "")
        return None if share is None or EFFORT in known else int(share * (limit or served.llm.max_context))
