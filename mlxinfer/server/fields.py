"""What the fields of request bodies are made of: strict types, and fields that are known but not supported yet."""

from __future__ import annotations

from typing import Annotated, Any, Union

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, GetCoreSchemaHandler, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

TAG = "<"
"""How the tags of unions begin, so that they are told from fields in the place of an error."""


class Body(BaseModel):
    """A JSON object with these fields and no others, of exactly these types. The values of refused fields are never quoted."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True, frozen=True)


def _kind(value: Any) -> str:
    """Which form of an input that may be a text or a list, of texts, numbers or lists."""
    if not isinstance(value, list):
        return "<text>"
    if not value or isinstance(value[0], (str, dict)):
        return "<items>"
    return "<lists>" if isinstance(value[0], list) else "<ids>"


def _text_or_list(value: Any) -> str:
    return "<items>" if isinstance(value, list) else "<text>"


def only(*neutral: Any, why: str = "not supported yet") -> Any:
    """A field that is known but has one meaning here: absent, null, or one of the neutral values."""

    def check(value: Any) -> Any:
        if value is None or any(type(value) is type(one) and value == one for one in neutral):
            return value
        raise PydanticCustomError("unsupported", "{why}", {"why": why})

    values = [None, *neutral]
    return Annotated[Any, AfterValidator(check), WithJsonSchema({"enum": values, "description": f"Other values are {why}."})]


class _FirstErrorOnly:
    """Stops reading a list at its first error: pydantic's own `FailFast` cannot stand in a union."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return {**handler(source), "fail_fast": True}


FIRST_ERROR_ONLY = _FirstErrorOnly()

TextOrTexts = Annotated[
    Union[Annotated[str, Tag("<text>")], Annotated[list[str], FIRST_ERROR_ONLY, Tag("<items>")]],
    Discriminator(_text_or_list),
]
Ids = Annotated[list[int], FIRST_ERROR_ONLY]
PromptOrPrompts = Annotated[
    Union[
        Annotated[str, Tag("<text>")],
        Annotated[list[str], FIRST_ERROR_ONLY, Tag("<items>")],
        Annotated[Ids, Tag("<ids>")],
        Annotated[list[Ids], FIRST_ERROR_ONLY, Tag("<lists>")],
    ],
    Discriminator(_kind),
]


class TextPart(Body):
    """A part of a message. Images, audio and files are refused by their name."""

    type: Annotated[str, AfterValidator(lambda value: _text_only(value)), WithJsonSchema({"enum": ["text"]})]
    text: str


def _text_only(kind: str) -> str:
    if kind == "text":
        return kind
    raise PydanticCustomError("unsupported", "only parts of type text are supported yet")


TextOrParts = Annotated[
    Union[Annotated[str, Tag("<text>")], Annotated[list[TextPart], FIRST_ERROR_ONLY, Tag("<items>")]],
    Discriminator(_text_or_list),
]


def plain_text(content: str | list[TextPart] | None) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or ())
