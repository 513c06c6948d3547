"""What requests of this API have in common."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Any, Union

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from ...errors import SamplingError
from ...types import SamplingParams
from .. import sse
from ..errors import APIError, invalid, of_error
from ..models import ServedModel
from ..validation import FIRST_ERROR_ONLY, StrictModel, Unsupported


class Error(TypedDict):
    """The message has the field's name where one is at fault."""

    error: str


def error_object(error: APIError) -> Error:
    return Error(error=error.message)


def error_response(error: APIError) -> Response:
    return JSONResponse(error_object(error), error.status)


def error_event(error: APIError) -> bytes:
    """The end of a stream that failed: clients raise it."""
    return sse.line(error_object(error))


MAX_STOPS = 16
Penalty = Annotated[float, Field(ge=-100, le=100)]

_RANDOM_SEED = -1
_ENDLESS = (-1, -2)
"""As long as there is room in the context."""
_RENAMED = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")},
    "repeat_penalty": "repetition_penalty",
}


class Options(StrictModel):
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
    repeat_last_n: Annotated[Any, Unsupported(-1, why="not supported yet: penalties are for the whole text, which is -1")] = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    mirostat: Annotated[Any, Unsupported(0)] = None
    mirostat_tau: Annotated[Any, Unsupported()] = None
    mirostat_eta: Annotated[Any, Unsupported()] = None
    tfs_z: Annotated[Any, Unsupported(1, 1.0)] = None
    typical_p: Annotated[Any, Unsupported(1, 1.0)] = None
    penalize_newline: Annotated[Any, Unsupported(True)] = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None

    def params(self, served: ServedModel, prompt_tokens: int, logprobs: int | None) -> SamplingParams:
        """The model's own defaults, with what the request says. Raises `APIError`."""
        given = {ours: value for name, ours in _RENAMED.items() if (value := getattr(self, name)) is not None}
        if not all(self.stop or ()):
            raise invalid("options.stop: an empty text stops nothing", "options.stop", "invalid_value")
        limit = self._limit(served, prompt_tokens)
        seed = None if self.seed == _RANDOM_SEED else self.seed
        try:
            return replace(served.llm.default_params, max_tokens=limit, stop=self.stop, seed=seed, logprobs=logprobs, **given)
        except SamplingError as error:
            raise of_error(error) from None

    def _limit(self, served: ServedModel, prompt_tokens: int) -> int | None:
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
            raise APIError(400, "invalid", message, param="options.num_ctx", code="context_length_exceeded")
        return room if wanted is None else min(wanted, room)


MAX_TOP_LOGPROBS = 20
_DURATION = re.compile(r"[+-]?(?:0|(?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|µs|ms|s|m|h))+", re.ASCII)


def _stays(value: int | float | str) -> int | float | str:
    """Models stay loaded, so that any time is honoured but none at all."""
    if isinstance(value, str) and not _DURATION.fullmatch(value):
        raise PydanticCustomError("duration", "must be seconds, or a duration like 5m")
    if not (re.search("[1-9]", value) if isinstance(value, str) else value):
        raise PydanticCustomError("unsupported", "not supported yet: models stay loaded as long as the server runs")
    return value


def _number_or_text(value: Any) -> str:
    return "<text>" if isinstance(value, str) else "<number>"


KeepAlive = Annotated[
    Union[Annotated[str, Field(max_length=64), Tag("<text>")], Annotated[float, Tag("<number>")]],
    Discriminator(_number_or_text),
    AfterValidator(_stays),
]


class Request(StrictModel):
    """The fields from `format` on are known, but have only their neutral values so far: a prompt that is too long is refused, not cut
    (`truncate`), and so does an answer end where the context does (`shift`)."""

    model: Annotated[str, Field(max_length=256)]
    stream: bool | None = None
    options: Options | None = None
    keep_alive: KeepAlive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    format: Annotated[Any, Unsupported("")] = None
    think: Annotated[Any, Unsupported(False)] = None
    truncate: Annotated[Any, Unsupported(False)] = None
    shift: Annotated[Any, Unsupported(False)] = None

    @property
    def streams(self) -> bool:
        return self.stream is not False

    def wanted_logprobs(self) -> int | None:
        """Raises `APIError`."""
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs is only for logprobs=true", "top_logprobs", "invalid_value")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def variables(self) -> dict[str, Any]:
        """For the chat template."""
        return {} if self.think is None else {"enable_thinking": False}
