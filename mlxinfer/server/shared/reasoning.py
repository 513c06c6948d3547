"""How much a request wants the model to think: as variables of its chat template, or as a number of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ...types import SamplingParams
from ..model_manager.registry import ServedModel

if TYPE_CHECKING:
    from ...engine.text.chat_prompt import ChatPrompt

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How hard to think, in the words of all dialects."""

SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates switch thinking on and off."""
EFFORT = "reasoning_effort"
"""The variable by which templates say how hard to think."""
_COMMON: Mapping[str, str] = {"minimal": "low", "xhigh": "high", "max": "high"}
"""For efforts that a template does not know, the nearest one that all know which have the variable."""
_SHARES: Mapping[str, float] = {"minimal": 0.1, "low": 0.2, "medium": 0.5, "high": 0.8, "xhigh": 0.95}
"""Part of an answer's tokens that thinking may take, where the template leaves the effort to us. OpenRouter divides them the same way."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """What a request says about thinking."""

    on: bool | None = None
    """Whether to think; None leaves it to the template."""
    effort: Effort | None = None
    """How hard; "none" switches it off."""
    budget: int | None = None
    """Tokens that thinking may take."""
    optional: bool = False
    """Whether a model whose template cannot switch thinking off may think all the same."""

    @property
    def wanted(self) -> bool | None:
        """Whether to think, from both fields."""
        if self.effort == "none":
            return False
        return True if self.on is None and self.effort is not None else self.on

    def variables(self, served: ServedModel, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Variables for the chat template: those of the request's own `given` that the template mentions, and what `on` and `effort` are
        to it."""
        known, source = served.llm.tokenizer.template_variables, served.llm.tokenizer.chat_template or ""
        found: dict[str, Any] = {} if self.wanted is None else dict.fromkeys(SWITCHES, self.wanted)
        if self.effort is not None and self.effort != "none":
            spelled = f'"{self.effort}"' in source or f"'{self.effort}'" in source
            found[EFFORT] = self.effort if spelled else _COMMON.get(self.effort, self.effort)
        return {name: value for name, value in {**found, **(given or {})}.items() if name in known}

    def held(self, params: SamplingParams, served: ServedModel, prompt: ChatPrompt) -> SamplingParams:
        """The parameters, with as many tokens for thinking as the request says. Models that do not think have no use for a number."""
        if prompt.format.reasoning is None:
            return params
        tokens = self._tokens(served, params.max_tokens)
        return params if tokens is None else replace(params, thinking_token_budget=tokens)

    def _tokens(self, served: ServedModel, limit: int | None) -> int | None:
        """Tokens that thinking may take, in an answer of `limit` at most; None is as many as the answer has."""
        if self.budget is not None:
            return self.budget
        known = served.llm.tokenizer.template_variables
        if self.wanted is False and known.isdisjoint(SWITCHES):
            return None if self.optional else 0
        share = _SHARES.get(self.effort or "")
        return None if share is None or EFFORT in known else int(share * (limit or served.llm.max_context))
