"""What requests of this API have in common."""

from __future__ import annotations

import re
from typing import Annotated, Any, Union

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from ..fields import Body, Only
from ..problems import invalid
from .options import Options

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


class Request(Body):
    """The fields from `format` on are known, but have only their neutral values so far: a prompt that is too long is refused, not cut
    (`truncate`), and so does an answer end where the context does (`shift`)."""

    model: Annotated[str, Field(max_length=256)]
    stream: bool | None = None
    options: Options | None = None
    keep_alive: KeepAlive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    format: Annotated[Any, Only("")] = None
    think: Annotated[Any, Only(False)] = None
    truncate: Annotated[Any, Only(False)] = None
    shift: Annotated[Any, Only(False)] = None

    @property
    def streams(self) -> bool:
        return self.stream is not False

    def wanted_logprobs(self) -> int | None:
        """Raises `Problem`."""
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs is only for logprobs=true", "top_logprobs", "invalid_value")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def variables(self) -> dict[str, Any]:
        """For the chat template."""
        return {} if self.think is None else {"enable_thinking": False}
