"""Input of the Responses API: items of the conversation, and tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Union

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from ..errors import invalid
from ..shared.images import Content, ImageSettings, SentImage, content_of, image_of_url, image_refused
from ..shared.tools import CallId, EarlierCalls, Name, Offer, make_offer, tools_field
from ..validation import FIRST_ERROR_ONLY, Ignored, OneOf, PartType, StrictModel, Unsupported, text_or_list, type_of
from .messages import MAX_MESSAGES
from .tools import Function, choice_of, kind_of_choice

_NOT_KEPT = 'not possible: item_reference names an item by its id, and responses are not kept: send the item itself ("store": false)'
Status = Literal["in_progress", "completed", "incomplete"]


class InputPart(StrictModel):
    """A part of a message's content. `annotations` and `logprobs` of an earlier answer are accepted and ignored."""

    type: Annotated[str, PartType("input_text", "output_text", others=["input_image"])]
    text: str
    annotations: Annotated[Any, Unsupported([])] = None
    logprobs: list[Any] | None = None


class InputImage(ImageSettings):
    """An image as a `data:` URL with base64. Other URLs are refused: the server fetches nothing."""

    type: Literal["input_image"]
    image_url: str | None = None
    file_id: Annotated[Any, Unsupported(why="not possible: files are not kept, send image_url with a data: URL")] = None


def _part_tag(value: Any) -> str:
    return "<image>" if type_of(value) == "input_image" else "<text>"


_Part = Annotated[Union[Annotated[InputPart, Tag("<text>")], Annotated[InputImage, Tag("<image>")]], Discriminator(_part_tag)]
_Content = Annotated[
    Union[Annotated[str, Tag("<text>")], Annotated[list[_Part], FIRST_ERROR_ONLY, Tag("<items>")]], Discriminator(text_or_list)
]


def _joined_text(content: str | Sequence[InputPart | InputImage], where: str) -> str:
    """The text of an answer or of instructions. Raises `APIError` for an image."""
    if isinstance(content, str):
        return content
    for number, part in enumerate(content):
        if isinstance(part, InputImage):
            field = f"{where}[{number}]"
            raise invalid(f"{field}: only messages of users and results of functions can have images", field, "invalid_value")
    return "".join(part.text for part in content if isinstance(part, InputPart))


def _with_images(content: str | Sequence[InputPart | InputImage], where: str) -> Content:
    """The content of a user's message or of a result. Raises `APIError`."""
    if isinstance(content, str):
        return content
    return content_of(
        part.text if isinstance(part, InputPart) else _image(part, f"{where}[{number}]") for number, part in enumerate(content)
    )


def _image(part: InputImage, where: str) -> SentImage:
    if part.image_url is None:
        raise image_refused("image_url is missing: send a data: URL", where)
    return image_of_url(part.image_url, where, part)


class MessageItem(StrictModel):
    """A message of the conversation. Clients may send an answer back unchanged, with `id`, `status` and `phase`."""

    type: Annotated[str, OneOf("message", "function_call", "function_call_output", "reasoning")] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content
    id: str | None = None
    status: Status | None = None
    phase: Annotated[Any, Ignored("an assistant's message is one text", within="input[]")] = None


class FunctionCallItem(StrictModel):
    """A call in an earlier answer. `arguments` is JSON text; other text goes to the template unchanged."""

    type: Literal["function_call"]
    call_id: CallId
    name: Name
    arguments: str
    id: str | None = None
    status: Status | None = None


class FunctionResultItem(StrictModel):
    """The result of a function."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: _Content
    id: str | None = None
    status: Status | None = None


class EarlierReasoningText(StrictModel):
    type: Literal["summary_text", "reasoning_text"]
    text: str


class ReasoningItem(StrictModel):
    """The reasoning before an earlier answer. `encrypted_content` comes from another server and is ignored."""

    type: Literal["reasoning"]
    summary: Annotated[list[EarlierReasoningText], FIRST_ERROR_ONLY] | None = None
    content: Annotated[list[EarlierReasoningText], FIRST_ERROR_ONLY] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: Status | None = None

    @property
    def plain(self) -> str:
        """The reasoning, or else its summary."""
        return "".join(part.text for part in self.content or self.summary or ())


class ItemReference(StrictModel):
    """A reference to an item of an earlier response. Always refused, because responses are not stored."""

    type: Literal["item_reference"] | None = None
    id: Annotated[str, Unsupported(why=_NOT_KEPT)]


_TYPES = ("function_call", "function_call_output", "reasoning", "item_reference")


def _item_tag(value: Any) -> str:
    kind = type_of(value)
    if kind is None and isinstance(value, dict) and value.keys() - {"type"} == {"id"}:
        return "<item_reference>"
    return f"<{kind}>" if kind in _TYPES else "<message>"


AnyItem = Annotated[
    Union[
        Annotated[MessageItem, Tag("<message>")],
        Annotated[FunctionCallItem, Tag("<function_call>")],
        Annotated[FunctionResultItem, Tag("<function_call_output>")],
        Annotated[ReasoningItem, Tag("<reasoning>")],
        Annotated[ItemReference, Tag("<item_reference>")],
    ],
    Discriminator(_item_tag),
]


def _calls_as_items(items: Any) -> Any:
    """Put calls inside of an assistant's message after the message. AnyLanguageModel sends earlier calls inside of one."""
    return [each for item in items for each in _without_calls(item)] if isinstance(items, list) else items


def _without_calls(item: Any) -> list[Any]:
    content: Any = item.get("content") if isinstance(item, dict) and item.get("role") == "assistant" else None
    calls = [part for part in content if type_of(part) == "function_call"] if isinstance(content, list) else []
    if not calls:
        return [item]
    others = [part for part in content if type_of(part) != "function_call"]
    return [*([{**item, "content": others}] if others else []), *calls]


Items = Annotated[list[AnyItem], FIRST_ERROR_ONLY, BeforeValidator(_calls_as_items), Field(min_length=1, max_length=MAX_MESSAGES)]


def for_template(
    items: Sequence[MessageItem | FunctionCallItem | FunctionResultItem | ReasoningItem | ItemReference],
) -> list[dict[str, Any]]:
    """The conversation in the form of chat templates. Reasoning, text and calls of one turn become one message. Raises `APIError`."""
    messages: list[dict[str, Any]] = []
    calls = EarlierCalls()
    turn: dict[str, Any] | None = None
    for number, item in enumerate(items):
        assert not isinstance(item, ItemReference)  # validation refuses all of them
        if isinstance(item, FunctionResultItem):
            output = _with_images(item.output, f"input[{number}].output")
            messages.append(calls.result(item.call_id, output, f"input[{number}].call_id"))
            turn = None
        elif isinstance(item, MessageItem) and item.role != "assistant":
            where = f"input[{number}].content"
            content = _with_images(item.content, where) if item.role == "user" else _joined_text(item.content, where)
            messages.append({"role": "system" if item.role == "developer" else item.role, "content": content})
            turn = None
        else:
            if turn is None or (not isinstance(item, FunctionCallItem) and (turn["content"] or "tool_calls" in turn)):
                messages.append(turn := {"role": "assistant", "content": ""})
            _add_to_turn(turn, item, calls, f"input[{number}]")
    return messages


def _add_to_turn(turn: dict[str, Any], item: MessageItem | FunctionCallItem | ReasoningItem, calls: EarlierCalls, where: str) -> None:
    """Add an item to an assistant's message."""
    if isinstance(item, FunctionCallItem):
        turn.setdefault("tool_calls", []).append(calls.call(item.call_id, item.name, item.arguments))
    elif isinstance(item, ReasoningItem):
        turn["reasoning_content"] = turn.get("reasoning_content", "") + item.plain
    else:
        turn["content"] = _joined_text(item.content, f"{where}.content")


class ResponseFunction(Function):
    """A function in the form of this API."""

    type: Literal["function"]
    defer_loading: Annotated[Any, Ignored("all tools are in the prompt", within="tools[]")] = None


_DROPPED = (
    *("web_search", "web_search_preview", "web_search_2025_08_26", "web_search_preview_2025_03_11", "image_generation"),
    *("custom", "local_shell", "shell", "apply_patch", "tool_search", "namespace"),
)
"""Types of tools that agents add to every request next to functions. Tool types that a client would add only on purpose are refused."""


class OtherTool(StrictModel):
    """A tool that is not offered to the model: OpenAI's servers would run it, or only OpenAI's models can call it."""

    model_config = ConfigDict(extra="allow")
    type: Annotated[str, OneOf("function", *_DROPPED), Ignored("only functions are offered to the model", within="tools[]")]


def _tool_tag(value: Any) -> str:
    return "<function>" if type_of(value) == "function" else "<other>"


Tools = tools_field(
    Annotated[
        Union[Annotated[ResponseFunction, Tag("<function>")], Annotated[OtherTool, Tag("<other>")]],
        Discriminator(_tool_tag),
    ]
)


class ChosenTool(StrictModel):
    type: Annotated[str, OneOf("function")]
    name: Name


class AllowedResponseTools(StrictModel):
    """Tools of a request that may or must be called now."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], FIRST_ERROR_ONLY]


ResponseToolChoice = Annotated[
    Union[
        Annotated[Literal["none", "auto", "required"], Tag("<mode>")],
        Annotated[ChosenTool, Tag("<one>")],
        Annotated[AllowedResponseTools, Tag("<allowed>")],
    ],
    Discriminator(kind_of_choice),
]


def offer_of(tools: Sequence[ResponseFunction | OtherTool], choice: Any, parallel: bool | None) -> Offer:
    """The tools of a request. Raises `APIError`."""
    made = [tool.tool(f"tools[{number}]") for number, tool in enumerate(tools) if isinstance(tool, ResponseFunction)]
    if isinstance(choice, AllowedResponseTools):
        return make_offer("tools", made, choice_of(choice.mode, None, parallel), chosen={one.name for one in choice.tools})
    if isinstance(choice, ChosenTool):
        return make_offer("tools", made, choice_of("required", choice.name, parallel))
    return make_offer("tools", made, choice_of(choice or "auto", None, parallel))
