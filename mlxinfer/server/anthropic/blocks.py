"""Messages of a conversation, which consist of blocks, and their form for chat templates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Union

from pydantic import Discriminator, Field, Tag

from ..errors import invalid
from ..shared.images import Content, SentImage, content_of, joined
from ..shared.tools import CallId, EarlierCalls, Name
from ..validation import FIRST_ERROR_ONLY, Ignored, OneOf, PartType, StrictModel, Unsupported, text_or_list, type_of

MAX_MESSAGES = 4096
_BETWEEN_TURNS = "\n\n"


class CacheControl(StrictModel):
    """A mark for the cache. All prefixes are cached anyway; with marks `usage` reports cached tokens separately. Cached prefixes stay
    while memory is free, whatever `ttl` says."""

    type: Annotated[str, OneOf("ephemeral")]
    ttl: Literal["5m", "1h"] | None = None
    scope: Annotated[Any, Ignored("all prompts are cached", within="cache_control")] = None


class TextBlock(StrictModel):
    """A block of text. Documents are refused by their type."""

    type: Annotated[str, PartType("text", others=["image"])]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[Any, Unsupported([])] = None


class SystemBlock(TextBlock):
    """A block of the system message, which has text only."""

    type: Annotated[str, PartType("text")]


class ImageSource(StrictModel):
    """The base64 of an image. The format is read from its bytes, whatever `media_type` says."""

    type: Annotated[str, OneOf("base64", why="not possible, because the server fetches nothing and keeps no files")]
    media_type: Annotated[str, Field(max_length=256)] | None = None
    data: str


class ImageBlock(StrictModel):
    """An image."""

    type: Literal["image"]
    source: ImageSource
    cache_control: CacheControl | None = None

    def sent(self, where: str) -> SentImage:
        """The image, which is the request's field `where`."""
        return SentImage(where, self.source.data)


class ThinkingBlock(StrictModel):
    """Reasoning of an earlier answer, perhaps of another model. The template keeps or drops it."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(StrictModel):
    """Encrypted reasoning of an earlier answer. Accepted because clients send it back, and ignored."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(StrictModel):
    """A call in an earlier answer."""

    type: Literal["tool_use"]
    id: CallId
    name: Name
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Annotated[Any, Unsupported({"type": "direct"})] = None
    toolset_name: Annotated[Any, Unsupported()] = None


def _result_tag(value: Any) -> str:
    return "<image>" if type_of(value) == "image" else "<text>"


_ResultBlock = Annotated[Union[Annotated[TextBlock, Tag("<text>")], Annotated[ImageBlock, Tag("<image>")]], Discriminator(_result_tag)]
_ResultContent = Annotated[
    Union[Annotated[str, Tag("<text>")], Annotated[list[_ResultBlock], FIRST_ERROR_ONLY, Tag("<items>")]], Discriminator(text_or_list)
]


class ToolResultBlock(StrictModel):
    """The result of a tool. Templates have no field for errors: with `is_error` the text gets the prefix "Error:", unless it mentions an
    error itself."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: _ResultContent | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None

    def plain(self, where: str) -> Content:
        """The text and images of the result, which is the request's field `where`."""
        if isinstance(self.content, str):
            return self._marked(self.content) + self.content
        parts = [
            block.text if isinstance(block, TextBlock) else block.sent(f"{where}.content[{number}]")
            for number, block in enumerate(self.content or ())
        ]
        return content_of([self._marked("".join(part for part in parts if isinstance(part, str))), *parts])

    def _marked(self, text: str) -> str:
        return "Error: " if self.is_error and "error" not in text[:100].lower() else ""


_KINDS = ("image", "thinking", "redacted_thinking", "tool_use", "tool_result")


def _block_tag(value: Any) -> str:
    kind = type_of(value)
    return f"<{kind}>" if kind in _KINDS else "<text>"


AnyBlock = Union[TextBlock, ImageBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock, ToolResultBlock]
Block = Annotated[
    Union[
        Annotated[TextBlock, Tag("<text>")],
        Annotated[ImageBlock, Tag("<image>")],
        Annotated[ThinkingBlock, Tag("<thinking>")],
        Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")],
        Annotated[ToolUseBlock, Tag("<tool_use>")],
        Annotated[ToolResultBlock, Tag("<tool_result>")],
    ],
    Discriminator(_block_tag),
]
TurnContent = Annotated[
    Union[Annotated[str, Tag("<text>")], Annotated[list[Block], FIRST_ERROR_ONLY, Tag("<items>")]], Discriminator(text_or_list)
]
System = Annotated[
    Union[Annotated[str, Tag("<text>")], Annotated[list[SystemBlock], FIRST_ERROR_ONLY, Tag("<items>")]], Discriminator(text_or_list)
]


class Turn(StrictModel):
    """One message. A `system` message keeps its position, although some chat templates do not allow it after the first message."""

    role: Literal["user", "assistant", "system"]
    content: TurnContent

    @property
    def blocks(self) -> Sequence[AnyBlock]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


Messages = Annotated[list[Turn], FIRST_ERROR_ONLY, Field(min_length=1, max_length=MAX_MESSAGES)]


def for_template(system: str | Sequence[TextBlock] | None, messages: Sequence[Turn]) -> list[dict[str, Any]]:
    """The conversation in the form of chat templates. Consecutive turns of the same role are merged, as in Anthropic's API, and each
    result of a tool becomes a message. Raises `APIError`."""
    if messages[-1].role == "assistant":
        last = f"messages[{len(messages) - 1}]"
        raise invalid(f"{last}: continuing an answer is not supported yet: the last message must not be an answer", last)
    instructions = system if isinstance(system, str) or system is None else "".join(block.text for block in system)
    turns: list[dict[str, Any]] = [] if not instructions else [{"role": "system", "content": instructions}]
    calls = EarlierCalls()
    for number, message in enumerate(messages):
        for turn in _split_turn(message, f"messages[{number}].content", calls):
            if turns and turns[-1]["role"] == turn["role"] != "tool":
                turns[-1] = _merge_turns(turns[-1], turn)
            else:
                turns.append(turn)
    return turns


_BLOCKS_OF: dict[str, tuple[tuple[type[AnyBlock], ...], str]] = {
    "assistant": (
        (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
        "only a user's message can have images and results of tools",
    ),
    "user": ((TextBlock, ImageBlock, ToolResultBlock), "only an assistant's message can have thinking and calls"),
    "system": ((TextBlock,), "a system message has text only"),
}


def _split_turn(message: Turn, where: str, calls: EarlierCalls) -> Iterator[dict[str, Any]]:
    """The messages of one turn: results of tools first, because templates expect them right after the calls. Raises `APIError`."""
    kinds, why = _BLOCKS_OF[message.role]
    blocks = message.blocks
    for number, block in enumerate(blocks):
        if not isinstance(block, kinds):
            raise invalid(f"{where}[{number}]: {why}", f"{where}[{number}]")
        if isinstance(block, ToolResultBlock):
            yield calls.result(block.tool_use_id, block.plain(f"{where}[{number}]"), f"{where}[{number}].tool_use_id")
    content = content_of(
        block.text if isinstance(block, TextBlock) else block.sent(f"{where}[{number}]")
        for number, block in enumerate(blocks)
        if isinstance(block, (TextBlock, ImageBlock))
    )
    if not content and any(isinstance(block, ToolResultBlock) for block in blocks):
        return
    turn: dict[str, Any] = {"role": message.role, "content": content}
    thinking = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    if thinking:
        turn["reasoning_content"] = thinking
    asked = [calls.call(block.id, block.name, block.input) for block in blocks if isinstance(block, ToolUseBlock)]
    yield {**turn, "tool_calls": asked} if asked else turn


def _merge_turns(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    texts: dict[str, Any] = {
        name: joined(one.get(name) or "", other.get(name) or "", _BETWEEN_TURNS)
        for name in ("content", "reasoning_content")
        if name in one or name in other
    }
    asked = [*one.get("tool_calls", ()), *other.get("tool_calls", ())]
    return {"role": one["role"], **texts, **({"tool_calls": asked} if asked else {})}


def cache_marks(system: str | Sequence[TextBlock] | None, messages: Sequence[Turn]) -> Iterator[CacheControl]:
    """The cache marks of a conversation."""
    marked = [*(() if isinstance(system, str) else system or ()), *(block for message in messages for block in message.blocks)]
    return (found for block in marked if (found := getattr(block, "cache_control", None)))
