"""Ollama's `options`, and what they mean to the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from ...errors import SamplingError
from ...types import SamplingParams
from ..fields import FIRST_ERROR_ONLY, Body, Only
from ..models import Served
from ..problems import Problem, invalid, of_error

MAX_STOPS = 16
Penalty = Annotated[float, Field(ge=-100, le=100)]

_RANDOM_SEED = -1
_ENDLESS = (-1, -2)
"""As long as there is room in the context."""
_RENAMED = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")},
    "repeat_penalty": "repetition_penalty",
}


class Options(Body):
    """The fields from `mirostat` to `penalize_newline` are other ways to choose tokens, and have only the values that switch them off.

    Those from `num_keep` on say how Ollama's own runner does its work, not what comes out of it. Open WebUI, Continue and LangChain send
    them, so they are taken, and change nothing: the memory and the threads of a model are settled when it is loaded. `num_keep` is for
    prompts that are cut, which is not done here.
    """

    num_ctx: Annotated[int, Field(ge=1)] | None = None
    num_predict: Annotated[int, Field(ge=-2, le=2**31 - 1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stop: Annotated[list[str], FIRST_ERROR_ONLY, Field(max_length=MAX_STOPS)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    repeat_last_n: Annotated[Any, Only(-1, why="not supported yet: penalties are for the whole text, which is -1")] = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    mirostat: Annotated[Any, Only(0)] = None
    mirostat_tau: Annotated[Any, Only()] = None
    mirostat_eta: Annotated[Any, Only()] = None
    tfs_z: Annotated[Any, Only(1, 1.0)] = None
    typical_p: Annotated[Any, Only(1, 1.0)] = None
    penalize_newline: Annotated[Any, Only(True)] = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None

    def params(self, served: Served, prompt_tokens: int, logprobs: int | None) -> SamplingParams:
        """The model's own defaults, with what the request says. Raises `Problem`."""
        given = {ours: value for name, ours in _RENAMED.items() if (value := getattr(self, name)) is not None}
        if not all(self.stop or ()):
            raise invalid("options.stop: an empty text stops nothing", "options.stop", "invalid_value")
        limit = self._limit(served, prompt_tokens)
        seed = None if self.seed == _RANDOM_SEED else self.seed
        try:
            return replace(served.llm.default_params, max_tokens=limit, stop=self.stop, seed=seed, logprobs=logprobs, **given)
        except SamplingError as error:
            raise of_error(error) from None

    def _limit(self, served: Served, prompt_tokens: int) -> int | None:
        """Tokens of an answer: what is asked for, or what there is room for in a context of `num_ctx`."""
        if self.num_predict == 0:
            raise invalid("options.num_predict: at least 1, or -1 for no limit", "options.num_predict", "invalid_value")
        wanted = None if self.num_predict in _ENDLESS else self.num_predict
        if self.num_ctx is None:
            return wanted
        if self.num_ctx > served.llm.max_context:
            most = f"options.num_ctx: the context is of {served.llm.max_context} tokens at most, not {self.num_ctx}"
            raise invalid(most, "options.num_ctx", "invalid_value")
        room = self.num_ctx - prompt_tokens
        if room < 1:
            message = f"the prompt has {prompt_tokens} tokens, which leaves no room for an answer in options.num_ctx ({self.num_ctx})"
            raise Problem(400, "invalid", message, param="options.num_ctx", code="context_length_exceeded")
        return room if wanted is None else min(wanted, room)
