"""What `/v1/responses` takes and gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Union

from pydantic import Discriminator, Field, Tag
from typing_extensions import TypedDict

from ..fields import FIRST_ERROR_ONLY, Among, Body, Only, text_or_list
from ..problems import invalid
from .logprobs import ContentLogprob
from .messages import MAX_MESSAGES
from .schema import MAX_TOP_LOGPROBS, Sampled

LOGPROBS = "message.output_text.logprobs"


class Part(Body):
    """Of a message's content. What an answer said of its text may come back with it, and is not needed."""

    type: Annotated[str, Among("input_text", "output_text")]
    text: str
    annotations: Annotated[Any, Only([])] = None
    logprobs: list[Any] | None = None


_Content = Annotated[
    Union[Annotated[str, Tag("<text>")], Annotated[list[Part], FIRST_ERROR_ONLY, Tag("<items>")]], Discriminator(text_or_list)
]


class Item(Body):
    """A message. Answers may be sent back as they came, with `id`, `status` and `phase`."""

    type: Annotated[str, Among("message")] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: Annotated[Any, Only("final_answer")] = None

    def plain(self) -> dict[str, Any]:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


_Items = Annotated[list[Item], FIRST_ERROR_ONLY, Field(min_length=1, max_length=MAX_MESSAGES)]


class ResponseRequest(Sampled):
    """Nothing is kept: `store` is false where it is not given, and what needs an earlier response is refused."""

    input: Annotated[Union[Annotated[str, Tag("<text>")], Annotated[_Items, Tag("<items>")]], Discriminator(text_or_list)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: Annotated[list[Annotated[str, Among(LOGPROBS)]], FIRST_ERROR_ONLY] | None = None
    store: Annotated[Any, Only(False, why="not possible: responses are not kept")] = None
    previous_response_id: Annotated[Any, Only(why="not possible: responses are not kept, send the conversation")] = None
    conversation: Annotated[Any, Only(why="not possible: conversations are not kept, send the messages")] = None
    metadata: Annotated[Any, Only({}, why="only for stored responses, which there are none of")] = None
    background: Annotated[Any, Only(False)] = None
    tools: Annotated[Any, Only([])] = None
    tool_choice: Annotated[Any, Only("none", "auto")] = None
    parallel_tool_calls: Annotated[Any, Only(True, False)] = None
    max_tool_calls: Annotated[Any, Only()] = None
    reasoning: Annotated[Any, Only({})] = None
    text: Annotated[Any, Only({}, {"format": {"type": "text"}})] = None
    truncation: Annotated[Any, Only("disabled")] = None
    context_management: Annotated[Any, Only([])] = None
    prompt: Annotated[Any, Only()] = None
    moderation: Annotated[Any, Only()] = None
    stream_options: Annotated[Any, Only({}, {"include_obfuscation": False})] = None
    service_tier: Annotated[Any, Only("auto", "default")] = None
    prompt_cache_retention: Annotated[Any, Only("in_memory")] = None
    prompt_cache_options: Annotated[Any, Only({})] = None
    # As for chat completions: the cache goes by the text of prompts.
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None

    def messages(self) -> list[dict[str, Any]]:
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else [item.plain() for item in self.input]
        return items if self.instructions is None else [{"role": "system", "content": self.instructions}, *items]

    def wanted_logprobs(self) -> int | None:
        """Raises `Problem`."""
        wanted = LOGPROBS in (self.include or ())
        if self.top_logprobs and not wanted:
            raise invalid(f"top_logprobs is only for include=[{LOGPROBS!r}]", "top_logprobs", "invalid_value")
        return (self.top_logprobs or 0) if wanted else None


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: Sequence[ContentLogprob]


class Message(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class InputDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseObject(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[Message]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str
    tools: list[Any]
    top_p: float
    top_logprobs: int
    truncation: str
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]
    background: bool
