"""Messages and tools of `/api/chat`, and their form for chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Union

from pydantic import Discriminator, Field, Tag

from ...tools import ToolChoice
from ..errors import invalid, unsupported
from ..shared.images import Content, content_of, sent_image
from ..shared.reasoning import Effort, Thinking
from ..shared.tools import CallId, EarlierCalls, Name, Offer, SchemaObject, make_offer, tool_from, tools_field
from ..validation import FIRST_ERROR_ONLY, OneOf, StrictModel

MAX_MESSAGES = 4096


class OllamaFunction(StrictModel):
    """A function that the model may call. `parameters` is the JSON Schema of its arguments."""

    name: Name
    description: str | None = None
    parameters: SchemaObject | None = None
    strict: bool | None = None


class OllamaTool(StrictModel):
    type: Annotated[str, OneOf("function")] = "function"
    function: OllamaFunction


OllamaTools = tools_field(OllamaTool)


def offer_of(tools: Sequence[OllamaTool]) -> Offer:
    """The tools of a request. Raises `APIError`."""
    functions = [tool.function for tool in tools]
    made = [tool_from(f"tools[{n}].function", f.name, f.description, f.parameters, f.strict) for n, f in enumerate(functions)]
    return make_offer("tools", made, ToolChoice())


class OllamaFunctionCall(StrictModel):
    name: Name
    arguments: dict[str, Any]
    index: int | None = None


class OllamaCall(StrictModel):
    """A call in an earlier answer. Clients of older versions send it without `id`."""

    id: CallId | None = None
    type: Annotated[str, OneOf("function")] = "function"
    function: OllamaFunctionCall


Images = Annotated[list[str], FIRST_ERROR_ONLY]
"""Images as base64, or as `data:` URLs with base64."""


class OllamaMessage(StrictModel):
    """The images come before the text. The template keeps or drops the `thinking` of earlier answers. A message of the role `tool`
    answers the call with its `tool_call_id`. Without this id it answers the first open call of the tool `tool_name`, or of any tool."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: Annotated[list[OllamaCall], FIRST_ERROR_ONLY] | None = None
    tool_name: Annotated[str, Field(max_length=256)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None


Messages = Annotated[list[OllamaMessage], FIRST_ERROR_ONLY, Field(max_length=MAX_MESSAGES)]


def for_template(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """The conversation in the form of chat templates. Raises `APIError`."""
    calls = EarlierCalls()
    plain = [_template_message(message, number, calls) for number, message in enumerate(messages)]
    if messages[-1].role == "assistant":
        last = f"messages[{len(messages) - 1}]"
        raise unsupported(last, f"{last}: continuing an answer is not supported yet: the last message must not be an answer")
    return plain


def _template_message(message: OllamaMessage, number: int, calls: EarlierCalls) -> dict[str, Any]:
    where = f"messages[{number}]"
    if message.role != "assistant":
        for field in ("thinking", "tool_calls"):
            if getattr(message, field):
                raise invalid(f"{where}.{field}: only an assistant's message has it", f"{where}.{field}", "invalid_value")
    if message.role == "tool":
        return _template_result(message, where, calls)
    plain: dict[str, Any] = {"role": message.role, "content": _content(message, where)}
    if message.thinking:
        plain["reasoning_content"] = message.thinking
    asked = [
        calls.call(call.id or f"call_{number}_{index}", call.function.name, call.function.arguments)
        for index, call in enumerate(message.tool_calls or ())
    ]
    return {**plain, "tool_calls": asked} if asked else plain


def _template_result(message: OllamaMessage, where: str, calls: EarlierCalls) -> dict[str, Any]:
    call_id = message.tool_call_id or calls.unanswered(message.tool_name or None)
    if call_id is None:
        wrong = f"{where}: a result of a tool that no earlier message called"
        raise invalid(wrong, where, "invalid_value")
    return calls.result(call_id, _content(message, where), f"{where}.tool_call_id")


def _content(message: OllamaMessage, where: str) -> Content:
    if message.images and message.role not in ("user", "tool"):
        raise invalid(f"{where}.images: only messages of users and tools have images", f"{where}.images", "invalid_value")
    return with_images(message.content or "", message.images, f"{where}.")


def with_images(text: str, images: Sequence[str] | None, where: str = "") -> Content:
    """A text with images before it, which are the request's field `images` after `where`. Raises `APIError`."""
    return content_of([*(sent_image(image, f"{where}images[{number}]") for number, image in enumerate(images or ())), text])


def _switch_or_effort(value: Any) -> str:
    return "<switch>" if isinstance(value, bool) else "<effort>"


Think = Annotated[
    Union[Annotated[bool, Tag("<switch>")], Annotated[Literal["low", "medium", "high", "max"], Tag("<effort>")]],
    Discriminator(_switch_or_effort),
]
"""True or False to switch reasoning on or off, or an effort."""


def thinking_of(think: bool | Effort | None) -> Thinking:
    """The reasoning settings of a request."""
    return Thinking(think) if think is None or isinstance(think, bool) else Thinking(True, think)
