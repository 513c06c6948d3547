"""Building blocks for request bodies: strict types, unsupported fields, and fields without effect."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Union

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, Tag
from pydantic_core import PydanticCustomError, core_schema

TAG = "<"
"""First character of the tags of unions; distinguishes tags from field names in the location of an error."""


class StrictModel(BaseModel):
    """A JSON object with exactly these fields and types. Errors never quote a value, because it may be the text of a prompt."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True, frozen=True)


class Unsupported:
    """Annotates a known field that supports only null and the `neutral` values. Any other value is refused with an error that names the
    field and gives the reason `why`."""

    def __init__(self, *neutral: Any, why: str = "not supported yet") -> None:
        self.values = [None, *neutral]
        self.why = why

    def _check(self, value: Any) -> Any:
        if _is_one_of(self.values, value):
            return value
        raise PydanticCustomError("unsupported", "{why}", {"why": self.why})

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": self.values, "description": f"Other values are {self.why}."}


def _is_one_of(values: Iterable[Any], value: Any) -> bool:
    """True if `values` contains this value with the same type: True is not 1."""
    return any(type(value) is type(one) and value == one for one in values)


class Ignored:
    """Annotates a known field that has no effect here: any value is accepted, and the reason `why` goes to the log.

    A body is validated with a dict as its context. For each accepted field the dict gets the reason under the field's name, prefixed
    with the name of the enclosing object (`within`). Null, empty values, and the values in `but`, which do have an effect, are not
    recorded. Use `Unsupported` for a field if some of its values ask for an unsupported feature.
    """

    def __init__(self, why: str, *, within: str = "", but: Iterable[Any] = ()) -> None:
        self.why = why
        self._within = within
        self._silent = (*_EMPTY, *but)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        name = ".".join(filter(None, (self._within, handler.field_name)))

        def take(value: Any, info: core_schema.ValidationInfo) -> Any:
            if info.context is not None and not _is_one_of(self._silent, value):
                info.context[name] = self.why
            return value

        return core_schema.with_info_after_validator_function(take, handler(source))

    def __get_pydantic_json_schema__(self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "description": f"Taken without effect: {self.why}."}


_EMPTY: tuple[Any, ...] = (None, False, "", [], {})


class _FirstErrorOnly:
    """Stops validating a list at its first error. Pydantic's own `FailFast` does not work inside a union."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return {**handler(source), "fail_fast": True}


FIRST_ERROR_ONLY = _FirstErrorOnly()
"""Annotates lists whose length a client chooses."""


def text_or_list(value: Any) -> str:
    """The tag of a union of a text (`<text>`) and a list (`<items>`)."""
    return "<items>" if isinstance(value, list) else "<text>"


def _kind_of_prompt(value: Any) -> str:
    if not isinstance(value, list):
        return "<text>"
    if not value or not isinstance(value[0], (list, int)):
        return "<items>"
    return "<lists>" if isinstance(value[0], list) else "<ids>"


def _not_zero(value: int) -> int:
    if value == 0:
        raise PydanticCustomError("too_few_tokens", "at least 1, or -1 for as many as the context allows")
    return value


def _none_if_unlimited(value: int) -> int | None:
    return None if value == -1 else value


MaxTokensOrZero = Annotated[int, Field(ge=-1), AfterValidator(_none_if_unlimited)]
"""Maximum tokens of an answer. -1, which LM Studio and llama.cpp use for no limit, becomes None. 0 reads the prompt only."""
MaxTokens = Annotated[int, Field(ge=-1), AfterValidator(_not_zero), AfterValidator(_none_if_unlimited)]
"""As `MaxTokensOrZero`, with at least 1."""
Ids = Annotated[list[int], FIRST_ERROR_ONLY]
TextOrTexts = Annotated[
    Union[Annotated[str, Tag("<text>")], Annotated[list[str], FIRST_ERROR_ONLY, Tag("<items>")]],
    Discriminator(text_or_list),
]
PromptOrPrompts = Annotated[
    Union[
        Annotated[str, Tag("<text>")],
        Annotated[list[str], FIRST_ERROR_ONLY, Tag("<items>")],
        Annotated[Ids, Tag("<ids>")],
        Annotated[list[Ids], FIRST_ERROR_ONLY, Tag("<lists>")],
    ],
    Discriminator(_kind_of_prompt),
]


class OneOf(Unsupported):
    """Annotates a text that must be one of the supported values. The error lists these values, and those of `others`: a union has further
    types for them."""

    def __init__(self, *known: str, others: Iterable[str] = (), why: str = "not supported yet") -> None:
        super().__init__(*known, why=f"{why}: only {' or '.join((*known, *others))}")
        self.values.remove(None)


class PartType(OneOf):
    """Annotates the type of a text part. The error names the type of sound, video or a file."""

    def _check(self, value: Any) -> Any:
        if value in _OTHER_MEDIA:
            raise PydanticCustomError("unsupported", "{value} is {why}", {"value": value, "why": self.why})
        return super()._check(value)


_OTHER_MEDIA = frozenset(
    ("input_audio", "audio", "audio_url", "video", "video_url", "input_video", "file", "input_file", "document", "search_result")
)


def type_of(value: Any) -> Any:
    """The `type` of a JSON object or of a validated model; None without one."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
