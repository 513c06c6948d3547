"""What the endpoints of this dialect share: errors, options and the fields of requests that generate."""

from __future__ import annotations

import re
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
from ..errors import APIError, invalid
from ..models import ServedModel
from ..structure import SchemaField, made, refused
from ..validation import FIRST_ERROR_ONLY, StrictModel, Unsupported
from .messages import Think

MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
Penalty = Annotated[float, Field(ge=-100, le=100)]
_RANDOM_SEED = -1
_ENDLESS = (-1, -2)
"""Values of `num_predict` for an answer as long as the context allows."""
_RENAMED = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")},
    "repeat_penalty": "repetition_penalty",
}
"""Sampling parameters by the name of the option."""
_DURATION = re.compile(r"[+-]?(?:0|(?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|µs|ms|s|m|h))+", re.ASCII)


class Error(TypedDict):
    """The name of the field at fault is part of the message."""

    error: str


def error_object(error: APIError) -> Error:
    return Error(error=error.message)


def error_response(error: APIError) -> Response:
    """The response to a request that failed."""
    return JSONResponse(error_object(error), error.status)


def error_event(error: APIError) -> bytes:
    """The last line of a stream that failed, which clients raise."""
    return sse.line(error_object(error))


class Options(StrictModel):
    """Settings of a request. Of the fields from `mirostat` to `penalize_newline`, only the values that switch them off are supported.

    Those from `num_keep` on say how Ollama's own runner works, not what it answers. They are accepted without effect, because Open WebUI,
    Continue and LangChain send them: memory and threads are fixed when a model is loaded, and prompts are never cut (`num_keep`).
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

    def params(self, served: ServedModel, prompt_tokens: int, logprobs: int | None, structure: Structure | None) -> SamplingParams:
        """The model's default parameters, overridden by the request's. Raises `APIError`."""
        given = {ours: value for name, ours in _RENAMED.items() if (value := getattr(self, name)) is not None}
        if not all(self.stop or ()):
            raise invalid("options.stop: an empty text stops nothing", "options.stop", "invalid_value")
        limit = self._limit(served, prompt_tokens)
        seed = None if self.seed == _RANDOM_SEED else self.seed
        try:
            chosen: dict[str, Any] = {"max_tokens": limit, "stop": self.stop, "seed": seed, "logprobs": logprobs, "structure": structure}
            return replace(served.llm.default_params, **chosen, **given)
        except SamplingError as error:
            raise refused(error, "format") from None

    def _limit(self, served: ServedModel, prompt_tokens: int) -> int | None:
        """Tokens that an answer may have: `num_predict`, but no more than fit into a context of `num_ctx`."""
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


def _stays(value: int | float | str) -> int | float | str:
    """Models stay loaded, so every duration is honoured but zero."""
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
    """What both generating endpoints accept. `format` is "json" or a schema. Of the fields after `think`, only the neutral values are
    supported so far: a prompt that is too long is refused instead of cut (`truncate`), and an answer ends where the context does
    (`shift`)."""

    model: Annotated[str, Field(max_length=256)]
    stream: bool | None = None
    options: Options | None = None
    keep_alive: KeepAlive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    format: SchemaField | None = None
    think: Think | None = None
    truncate: Annotated[Any, Unsupported(False)] = None
    shift: Annotated[Any, Unsupported(False)] = None

    def structure(self) -> Structure | None:
        """What the answer is held to. Raises `APIError`."""
        if self.format in (None, ""):
            return None
        return JSON_OBJECT if self.format == "json" else made("format", self.format, Schema)

    @property
    def streams(self) -> bool:
        """Whether the answer is streamed, which is this API's default."""
        return self.stream is not False

    def wanted_logprobs(self) -> int | None:
        """Alternatives for each token whose log-probabilities are returned; None is no log-probabilities. Raises `APIError`."""
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs is only for logprobs=true", "top_logprobs", "invalid_value")
        return (self.top_logprobs or 0) if self.logprobs else None
