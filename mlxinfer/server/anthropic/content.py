"""Messages as this API sends them, and as chat templates take them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Union

from pydantic import Discriminator, Field, Tag

from ..fields import FIRST_ERROR_ONLY, Among, Body, Only, text_or_list
from ..problems import invalid

MAX_MESSAGES = 4096
_BETWEEN_TURNS = "\n\n"


class CacheControl(Body):
    """Every prompt is kept for others that begin alike, marked or not: a mark asks for what is done anyway, and that `usage` tells the
    tokens that were found apart from the others. How long they are kept is for the room there is to say."""

    type: Annotated[str, Among("ephemeral")]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Body):
    """Images, documents, tools and their results are refused by their type."""

    type: Annotated[str, Among("text")]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[Any, Only([])] = None


class ThinkingBlock(Body):
    """Of an earlier answer, perhaps another model's: clients send the whole conversation back. The template keeps or drops it."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Body):
    """Thinking that only the service that wrote it can read: left out, and accepted because clients send conversations back whole."""

    type: Literal["redacted_thinking"]
    data: str


def _kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"<{kind}>" if kind in ("thinking", "redacted_thinking") else "<text>"


Block = Annotated[
    Union[
        Annotated[TextBlock, Tag("<text>")],
        Annotated[ThinkingBlock, Tag("<thinking>")],
        Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")],
    ],
    Discriminator(_kind),
]
Content = Annotated[
    Union[Annotated[str, Tag("<text>")], Annotated[list[Block], FIRST_ERROR_ONLY, Tag("<items>")]], Discriminator(text_or_list)
]
System = Annotated[
    Union[Annotated[str, Tag("<text>")], Annotated[list[TextBlock], FIRST_ERROR_ONLY, Tag("<items>")]], Discriminator(text_or_list)
]


class Turn(Body):
    """A `system` message stands where it is; not every chat template takes one in the middle."""

    role: Literal["user", "assistant", "system"]
    content: Content

    @property
    def blocks(self) -> list[TextBlock | ThinkingBlock | RedactedThinkingBlock]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


Messages = Annotated[list[Turn], FIRST_ERROR_ONLY, Field(min_length=1, max_length=MAX_MESSAGES)]


def for_template(system: str | list[TextBlock] | None, messages: Sequence[Turn]) -> list[dict[str, Any]]:
    """Turns of the same role that follow one another become one, as the API says. Raises `Problem`."""
    for number, message in enumerate(messages):
        if message.role != "assistant" and any(not isinstance(block, TextBlock) for block in message.blocks):
            raise invalid(f"messages[{number}].content: only an assistant's message has thinking", f"messages[{number}].content")
    if messages[-1].role == "assistant":
        last = f"messages[{len(messages) - 1}]"
        raise invalid(f"{last}: an answer that is begun cannot be continued yet: the last message must not be one", last)
    instructions = system if isinstance(system, str) or system is None else "".join(block.text for block in system)
    turns: list[dict[str, Any]] = [] if not instructions else [{"role": "system", "content": instructions}]
    for message in messages:
        turn = _turn(message)
        if turns and turns[-1]["role"] == turn["role"]:
            turns[-1] = _joined(turns[-1], turn)
        else:
            turns.append(turn)
    return turns


def _turn(message: Turn) -> dict[str, Any]:
    blocks = message.blocks
    turn: dict[str, Any] = {"role": message.role, "content": "".join(block.text for block in blocks if isinstance(block, TextBlock))}
    thinking = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    return {**turn, "reasoning_content": thinking} if thinking else turn


def _joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {name: _BETWEEN_TURNS.join(filter(None, (one.get(name), other.get(name)))) for name in {**one, **other}} | {"role": one["role"]}


def marks(system: str | list[TextBlock] | None, messages: Sequence[Turn]) -> Iterator[CacheControl]:
    """The wishes for caching among them."""
    texts = [*(system if isinstance(system, list) else ()), *(block for message in messages for block in message.blocks)]
    return (block.cache_control for block in texts if isinstance(block, TextBlock) and block.cache_control)
