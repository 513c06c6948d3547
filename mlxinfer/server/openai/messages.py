"""Messages of chat completions, and their form for chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Union

from pydantic import Discriminator, Field, Tag

from ..errors import APIError, invalid
from ..shared.images import Content, Detail, ImageSettings, SentImage, content_of, image_of_url
from ..shared.tools import CallId, EarlierCalls, Name
from ..validation import FIRST_ERROR_ONLY, OneOf, PartType, StrictModel, Unsupported, text_or_list, type_of

MAX_MESSAGES = 4096
_REASONING = ("reasoning", "reasoning_content", "thinking")
"""Fields for an assistant's reasoning: clients use different names."""
_WITH_IMAGES = ("user", "tool", "function")
"""Roles whose messages may have images."""


class TextPart(StrictModel):
    """A part of a message. Audio, video and files are refused by their type."""

    type: Annotated[str, PartType("text", others=["image_url"])]
    text: str


class ImageURL(StrictModel):
    """A `data:` URL with base64. Other URLs are refused: the server fetches nothing."""

    url: str
    detail: Detail | None = None


def _url_or_object(value: Any) -> str:
    return "<url>" if isinstance(value, str) else "<object>"


class ImagePart(ImageSettings):
    """An image. Some clients send the URL without the object around it, or `detail` beside it."""

    type: Literal["image_url"]
    image_url: Annotated[Union[Annotated[str, Tag("<url>")], Annotated[ImageURL, Tag("<object>")]], Discriminator(_url_or_object)]

    def sent(self, where: str) -> SentImage:
        """The image, which is the request's field `where`. Raises `APIError`."""
        if isinstance(self.image_url, str):
            return image_of_url(self.image_url, where, self)
        return image_of_url(self.image_url.url, where, self.model_copy(update={"detail": self.image_url.detail or self.detail}))


def _part_tag(value: Any) -> str:
    return "<image>" if type_of(value) == "image_url" else "<text>"


Part = Annotated[Union[Annotated[TextPart, Tag("<text>")], Annotated[ImagePart, Tag("<image>")]], Discriminator(_part_tag)]
TextOrParts = Annotated[
    Union[Annotated[str, Tag("<text>")], Annotated[list[Part], FIRST_ERROR_ONLY, Tag("<items>")]], Discriminator(text_or_list)
]


class EarlierFunctionCall(StrictModel):
    """`arguments` is JSON text. Other text goes to the template unchanged."""

    name: Name
    arguments: str


class MessageToolCall(StrictModel):
    """A call in an earlier answer. A call assembled from a stream may have an `index`."""

    id: CallId
    type: Annotated[str, OneOf("function")] = "function"
    function: EarlierFunctionCall
    index: int | None = None


class ChatMessage(StrictModel):
    """A message of a conversation. `developer` is the newer name of the role `system`. The template keeps or drops the reasoning, which
    has three names. `function_call` and the role `function` are the older form of `tool_calls` and `tool`."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    name: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    refusal: Annotated[Any, Unsupported()] = None
    tool_calls: Annotated[list[MessageToolCall], FIRST_ERROR_ONLY] | None = None
    tool_call_id: CallId | None = None
    function_call: EarlierFunctionCall | None = None
    audio: Annotated[Any, Unsupported()] = None
    annotations: Annotated[Any, Unsupported([])] = None
    content: TextOrParts | None = None


Messages = Annotated[list[ChatMessage], FIRST_ERROR_ONLY, Field(min_length=1, max_length=MAX_MESSAGES)]


def for_template(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The conversation in the form of chat templates. Raises `APIError`."""
    calls = EarlierCalls()
    return [_template_message(message, number, calls) for number, message in enumerate(messages)]


def _template_message(message: ChatMessage, number: int, calls: EarlierCalls) -> dict[str, Any]:
    where = f"messages[{number}]"
    if message.role != "assistant":
        _only_an_assistants(message, where)
    if message.role in ("tool", "function"):
        return _template_result(message, where, calls)
    asked = _template_calls(message, number, calls)
    if message.content is None and not asked:
        raise invalid(f"{where}.content: a text is needed", f"{where}.content", "invalid_value")
    content = _content(message, where)
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.name is not None:
        plain["name"] = message.name
    reasoning = next((given for field in _REASONING if (given := getattr(message, field)) is not None), None)
    if reasoning is not None:
        plain["reasoning_content"] = reasoning
    return {**plain, "tool_calls": asked} if asked else plain


def _only_an_assistants(message: ChatMessage, where: str) -> None:
    for field in (*_REASONING, "tool_calls", "function_call"):
        if getattr(message, field):
            what = "reasoning" if field in _REASONING else "calls"
            raise APIError(400, "invalid", f"{where}: only an assistant's message has {what}", param=where, code="invalid_value")


def _template_calls(message: ChatMessage, number: int, calls: EarlierCalls) -> list[dict[str, Any]]:
    asked = [calls.call(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    if message.function_call is None:
        return asked
    return [*asked, calls.call(f"call_{number}", message.function_call.name, message.function_call.arguments)]


def _template_result(message: ChatMessage, where: str, calls: EarlierCalls) -> dict[str, Any]:
    field = f"{where}.{'tool_call_id' if message.role == 'tool' else 'name'}"
    call_id = message.tool_call_id if message.role == "tool" else calls.unanswered(message.name or "")
    if call_id is None:
        wrong = "the id of the call is needed" if message.role == "tool" else "no earlier message called a function of this name"
        raise invalid(f"{field}: {wrong}", field, "invalid_value")
    return calls.result(call_id, _content(message, where), field)


def _content(message: ChatMessage, where: str) -> Content:
    """The content of a message, with its images. Raises `APIError`."""
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    images = [number for number, part in enumerate(message.content) if isinstance(part, ImagePart)]
    if images and message.role not in _WITH_IMAGES:
        field = f"{where}.content[{images[0]}]"
        raise invalid(f"{field}: only messages of users and results of tools can have images", field, "invalid_value")
    return content_of(
        part.sent(f"{where}.content[{number}]") if isinstance(part, ImagePart) else part.text for number, part in enumerate(message.content)
    )
