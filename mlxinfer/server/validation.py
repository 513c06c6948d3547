"""What the fields of request bodies are made of: strict types, and fields that are known but not supported yet."""

from __future__ import annotations

from typing import Annotated, Any, Union

from pydantic import BaseModel, ConfigDict, Discriminator, GetCoreSchemaHandler, GetJsonSchemaHandler, Tag
from pydantic_core import PydanticCustomError, core_schema

TAG = "<"
"""How the tags of unions begin, so that they are told from fields in the place of an error."""


class StrictModel(BaseModel):
    """A JSON object with these fields and no others, of exactly these types. Errors never quote what was given: it may be a prompt."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True, frozen=True)


class Unsupported:
    """Annotates a field that is known but has one meaning here: absent, null, or one of the neutral values. Others are refused by name,
    because they are "not supported yet" or for what `why` says."""

    def __init__(self, *neutral: Any, why: str = "not supported yet") -> None:
        self._values = [None, *neutral]
        self._why = why

    def _check(self, value: Any) -> Any:
        if any(type(value) is type(one) and value == one for one in self._values):
            return value
        raise PydanticCustomError("unsupported", "{why}", {"why": self._why})

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": self._values, "description": f"Other values are {self._why}."}


class _FirstErrorOnly:
    """Stops reading a list at its first error: pydantic's own `FailFast` cannot stand in a union."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return {**handler(source), "fail_fast": True}


FIRST_ERROR_ONLY = _FirstErrorOnly()


def text_or_list(value: Any) -> str:
    return "<items>" if isinstance(value, list) else "<text>"


def _kind_of_prompt(value: Any) -> str:
    if not isinstance(value, list):
        return "<text>"
    if not value or not isinstance(value[0], (list, int)):
        return "<items>"
    return "<lists>" if isinstance(value[0], list) else "<ids>"


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
    """Annotates a text that names a kind of something: those that are supported, others are refused by name."""

    def __init__(self, *known: str) -> None:
        super().__init__(*known, why=f"not supported yet: only {' or '.join(known)}")
        self._values.remove(None)


class TextPart(StrictModel):
    """A part of a message. Images, audio and files are refused by their name."""

    type: Annotated[str, OneOf("text")]
    text: str


TextOrParts = Annotated[
    Union[Annotated[str, Tag("<text>")], Annotated[list[TextPart], FIRST_ERROR_ONLY, Tag("<items>")]],
    Discriminator(text_or_list),
]


def plain_text(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
