"""Shared parts of this dialect: errors, options and the fields of generating requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Union

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from ...errors import SamplingError
from ...structure import JSON_OBJECT, Schema, Structure
from ...types import SamplingParams
from .. import sse
from ..errors import APIError, TooLong, invalid
from ..log import notice_once
from ..model_manager.duration import seconds_of
from ..model_manager.registry import ServedModel
from ..shared.structure import SchemaField, structure_from, structure_refused
from ..validation import FIRST_ERROR_ONLY, Ignored, StrictModel, Unsupported
from .messages import Think

MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
Penalty = Annotated[float, Field(ge=-100, le=100)]
_OPTIONS = "options"
_AS_LOADED = Ignored("memory and threads are fixed when a model is loaded", within=_OPTIONS)
_RANDOM_SEED = -1
_ENDLESS = (-1, -2)
"""Values of `num_predict` for an answer up to the end of the context."""
_RENAMED = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")},
    "repeat_penalty": "repetition_penalty",
}
"""Sampling parameters by the name of the option."""


class OllamaError(TypedDict):
    """The message includes the name of the field at fault."""

    error: str


def error_object(error: APIError) -> OllamaError:
    return OllamaError(error=error.message)


def error_response(error: APIError) -> Response:
    """The error response."""
    return JSONResponse(error_object(error), error.status)


def error_event(error: APIError) -> bytes:
    """The last line of a failed stream; clients raise it."""
    return sse.line(error_object(error))


class OllamaOptions(StrictModel):
    """Options of a request. Those from `num_keep` on configure Ollama's own runner and do not change the answer."""

    num_ctx: Annotated[int, Field(ge=1)] | None = None
    num_predict: Annotated[int, Field(ge=-2, le=2**31 - 1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stop: Annotated[list[str], FIRST_ERROR_ONLY, Field(max_length=MAX_STOPS)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    repeat_last_n: Annotated[int, Ignored("penalties apply to the whole text", within=_OPTIONS, but=(-1,))] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    mirostat: Annotated[Any, Unsupported(0)] = None
    mirostat_tau: Annotated[Any, Ignored("Mirostat is not supported", within=_OPTIONS)] = None
    mirostat_eta: Annotated[Any, Ignored("Mirostat is not supported", within=_OPTIONS)] = None
    tfs_z: Annotated[Any, Unsupported(1, 1.0)] = None
    typical_p: Annotated[Any, Unsupported(1, 1.0)] = None
    penalize_newline: Annotated[Any, Unsupported(True)] = None
    num_keep: Annotated[int, Ignored("prompts are never cut", within=_OPTIONS)] | None = None
    num_batch: Annotated[int, _AS_LOADED] | None = None
    num_gpu: Annotated[int, _AS_LOADED] | None = None
    main_gpu: Annotated[int, _AS_LOADED] | None = None
    num_thread: Annotated[int, _AS_LOADED] | None = None
    numa: Annotated[bool, _AS_LOADED] | None = None
    low_vram: Annotated[bool, _AS_LOADED] | None = None
    use_mmap: Annotated[bool, _AS_LOADED] | None = None
    use_mlock: Annotated[bool, _AS_LOADED] | None = None

    def params(self, served: ServedModel, prompt_tokens: int, logprobs: int | None, structure: Structure | None) -> SamplingParams:
        """The model's default parameters with the request's values. Raises `APIError`."""
        given = {ours: value for name, ours in _RENAMED.items() if (value := getattr(self, name)) is not None}
        if not all(self.stop or ()):
            raise invalid("options.stop: an empty text stops nothing", "options.stop", "invalid_value")
        limit = self._limit(served, prompt_tokens)
        seed = None if self.seed == _RANDOM_SEED else self.seed
        try:
            chosen: dict[str, Any] = {"max_tokens": limit, "stop": self.stop, "seed": seed, "logprobs": logprobs, "structure": structure}
            return replace(served.llm.default_params, **chosen, **given)
        except SamplingError as error:
            raise structure_refused(error, "format") from None

    def _limit(self, served: ServedModel, prompt_tokens: int) -> int | None:
        """Maximum tokens of an answer: `num_predict`, but no more than fit into a context of `num_ctx`."""
        if self.num_predict == 0:
            raise invalid("options.num_predict: at least 1, or -1 for no limit", "options.num_predict", "invalid_value")
        wanted = None if self.num_predict in _ENDLESS else self.num_predict
        if self.num_ctx is None:
            return wanted
        context = served.llm.max_context
        if self.num_ctx > context:
            notice_once(f"options.num_ctx is cut to the context of {served.name}, {context} tokens")
        if self.num_ctx >= context:
            return wanted
        room = self.num_ctx - prompt_tokens
        if room < 1:
            raise TooLong(prompt_tokens, self.num_ctx, "options.num_ctx")
        return room if wanted is None else min(wanted, room)


def _keep_alive_seconds(value: float | str) -> float:
    seconds = seconds_of(value)
    if seconds is None:
        raise PydanticCustomError("duration", "must be seconds, or a duration like 5m")
    return seconds


def _number_or_text(value: Any) -> str:
    return "<text>" if isinstance(value, str) else "<number>"


KeepAlive = Annotated[
    Union[Annotated[str, Field(max_length=64), Tag("<text>")], Annotated[float, Tag("<number>")]],
    Discriminator(_number_or_text),
    AfterValidator(_keep_alive_seconds),
]
"""Seconds after the answer for which the model stays loaded. A negative number means for ever."""


def seconds(keep_alive: str | float | None) -> float | None:
    """A validated `KeepAlive` in seconds; None means the server's default."""
    return None if keep_alive is None else float(keep_alive)


class OllamaRequest(StrictModel):
    """Fields of both generating endpoints. `format` is "json" or a schema."""

    model: Annotated[str, Field(max_length=256)]
    stream: bool | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    format: SchemaField | None = None
    think: Think | None = None
    truncate: Annotated[bool, Ignored("a prompt that is too long is refused, never cut")] | None = None
    shift: Annotated[bool, Ignored("an answer ends at the end of the context")] | None = None

    def structure(self) -> Structure | None:
        """The constraint on the answer. Raises `APIError`."""
        if self.format in (None, ""):
            return None
        return JSON_OBJECT if self.format == "json" else structure_from("format", self.format, Schema)

    @property
    def keep_alive_s(self) -> float | None:
        """Seconds after the answer for which the model stays loaded; None means the server's default."""
        return seconds(self.keep_alive)

    @property
    def streams(self) -> bool:
        """True if the answer is streamed, the default of this API."""
        return self.stream is not False

    def wanted_logprobs(self) -> int | None:
        """Alternatives per token in the log-probabilities; None means no log-probabilities. Raises `APIError`."""
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs is only for logprobs=true", "top_logprobs", "invalid_value")
        return (self.top_logprobs or 0) if self.logprobs else None
