"""Errors of requests in one form for all dialects. Each dialect renders them in the shape of its API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from ..errors import (
    ContextLengthError,
    DeadlineError,
    EngineError,
    MemoryPlanError,
    MLXInferError,
    ModelNotFoundError,
    PromptError,
    QueueFullError,
    SamplingError,
    TemplateError,
    UnsupportedModelError,
)
from .validation import TAG

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Kind = Literal[
    "invalid", "unsupported", "authentication", "permission", "not_found", "too_large", "rate_limit", "timeout", "overloaded", "internal"
]
"""Kind of an error. Dialects map it to the error types of their APIs."""

_MOST_FAULTS = 20
"""Faults of one body that the message names; further faults are only counted."""

RETRY_AFTER_S = 1
"""Default seconds in `Retry-After`."""


class APIError(Exception):
    """The error response to a request.

    `status` is the HTTP status, `message` one sentence for people, `param` the field at fault (`messages[0].content`), and `code` one
    word for programs.
    """

    def __init__(
        self, status: int, kind: Kind, message: str, *, param: str | None = None, code: str | None = None, retry_s: int = RETRY_AFTER_S
    ) -> None:
        """`retry_s`: seconds in the `Retry-After` header, which statuses 429 and 503 get."""
        super().__init__(message)
        self.status = status
        self.kind: Kind = kind
        self.message = message
        self.param = param
        self.code = code
        self._retry_s = retry_s

    @property
    def headers(self) -> dict[str, str]:
        """Headers that the status requires."""
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        if self.code == "ambiguous_length":
            return {"connection": "close"}
        return {"retry-after": str(self._retry_s)} if self.status in (429, 503) else {}


class TooLong(APIError):
    """400: a prompt of `tokens` tokens, `image_tokens` of them for images, leaves no space for an answer in a context of `context` tokens.

    The wording matters to clients that shorten a conversation and try again. LiteLLM, vibe and gptme match the first words of the
    message. LangChain looks for the code in the message.
    """

    def __init__(self, tokens: int, context: int, param: str | None = None, image_tokens: int = 0) -> None:
        of_images = f", {image_tokens} of them for images" if image_tokens else ""
        message = f"This model's maximum context length is {context} tokens. However, your prompt has {tokens} tokens{of_images}."
        super().__init__(400, "invalid", f"{message} Shorten it (context_length_exceeded).", param=param, code="context_length_exceeded")
        self.tokens = tokens
        self.context = context
        self.of_images = of_images


def invalid(message: str, param: str | None = None, code: str | None = None) -> APIError:
    """400: the request is malformed or contradicts itself."""
    return APIError(400, "invalid", message, param=param, code=code)


def unsupported(param: str, message: str | None = None) -> APIError:
    """400: a field, or a value of it, that this server knows but does not support."""
    return APIError(400, "unsupported", message or f"{param} is not supported yet", param=param, code="unsupported_parameter")


def no_such_model(name: str, served: Iterable[str]) -> APIError:
    """404: the model is not served. The message lists the served models."""
    message = f"The model {name[:200]!r} is not served here; available: {', '.join(served)}."
    return APIError(404, "not_found", message, param="model", code="model_not_found")


def timed_out(limit_s: float | None = None) -> APIError:
    """408: the answer was not finished within `Limits.request_s`."""
    limit = "it may" if limit_s is None else f"the {limit_s:g} s that it may"
    return APIError(408, "timeout", f"The request took longer than {limit} (serve --request-timeout).", code="timeout")


def stopping() -> APIError:
    """503: the server stopped before the answer was finished."""
    return APIError(503, "overloaded", "The request was stopped: the server is shutting down.", code="engine_stopped")


def server_failed() -> APIError:
    """500: a fault of this server. Its details go to the log only."""
    return APIError(500, "internal", "The server failed.", code="internal_error")


def from_engine_error(error: MLXInferError) -> APIError:
    """The response to an error from the engine or the tokenizer."""
    message = str(error)
    if isinstance(error, SamplingError):
        return invalid(message, param=message.partition(" ")[0].rstrip(":"))
    if isinstance(error, ContextLengthError):
        return TooLong(error.tokens, error.context, image_tokens=error.image_tokens)
    if isinstance(error, PromptError):
        return invalid(message)
    if isinstance(error, TemplateError):
        return invalid(message, param="messages")
    if isinstance(error, MemoryPlanError):
        return invalid(message, code="context_length_exceeded")
    if isinstance(error, ModelNotFoundError):
        return APIError(404, "not_found", message, param="model", code="model_not_found")
    if isinstance(error, UnsupportedModelError):
        return APIError(400, "unsupported", message, param="model", code="unsupported_model")
    if isinstance(error, QueueFullError):
        return APIError(429, "rate_limit", message, code="rate_limit_exceeded")
    if isinstance(error, DeadlineError):
        return timed_out()
    if isinstance(error, EngineError):
        return APIError(503, "overloaded", message, code="engine_stopped")
    return APIError(500, "internal", message, code="internal_error")


def from_validation_error(error: ValidationError) -> APIError:
    """The response to a body that does not fit its type. The message names all faults; `param` and `code` describe the first. Values are
    never quoted, because they may contain the text of a prompt."""
    faults = _without_consequences(error.errors(include_url=False, include_context=False, include_input=False))
    told = [_from_fault(fault["type"], _field(fault["loc"]), fault["msg"]) for fault in faults[:_MOST_FAULTS]]
    more = f"; and {len(faults) - len(told)} more" if len(faults) > len(told) else ""
    message = "; ".join(dict.fromkeys(one.message for one in told)) + more
    return APIError(400, told[0].kind, message, param=told[0].param, code=told[0].code)


def _without_consequences(faults: list[ErrorDetails]) -> list[ErrorDetails]:
    """Drop the follow-up faults of a part with an unsupported `type`: its other fields are unknown too."""
    refused = {fault["loc"][:-1] for fault in faults if fault["type"] == "unsupported" and fault["loc"][-1:] == ("type",)}
    return [fault for fault in faults if fault["type"] not in ("missing", "extra_forbidden") or fault["loc"][:-1] not in refused]


def _from_fault(kind: str, param: str, message: str) -> APIError:
    if kind == "json_invalid":
        return invalid(f"The body is not valid JSON: {message.removeprefix('Invalid JSON: ')}", code="invalid_json")
    if kind == "unsupported":
        return unsupported(param, f"{param}: {message}")
    if kind == "extra_forbidden":
        return invalid(f"Unknown field: {param}", param=param, code="unknown_parameter")
    if kind == "missing":
        return invalid(f"Missing required field: {param}", param=param, code="missing_required_parameter")
    return invalid(f"{param}: {message}" if param else message, param=param or None, code="invalid_value")


def _field(location: Iterable[int | str]) -> str:
    """The path of a field, such as `messages[0].content`, without the tags of unions."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier():
            path += f".{part}" if path else part
        elif not part.startswith(TAG):
            path += f"[{part[:100]!r}]"
    return path
