"""`POST /api/generate` and `POST /api/chat`: an answer to a prompt or to a conversation, complete or as JSON lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from starlette.types import ASGIApp

from ...types import SamplingParams
from .. import sse
from ..errors import TooLong, invalid
from ..model_manager.registry import ModelEntry, ServedModel
from ..routing import Doc, Endpoint, RequestContext, Server
from ..serving import GenerateRequest, encode_chat, encode_text
from ..shared.reasoning import Thinking
from ..validation import Ids, Unsupported
from .answers import ChatReply, GenerateReply, Lines, ReplyFields, as_message, as_response, reply_without_prompt
from .messages import Images, Messages, OllamaTools, for_template, offer_of, thinking_of, with_images
from .models import find_entry
from .protocol import OllamaOptions, OllamaRequest

if TYPE_CHECKING:
    from ...engine.text.chat_prompt import ChatPrompt


class OllamaGenerateRequest(OllamaRequest):
    """The body of `POST /api/generate`. `context` comes from an earlier answer: the tokens of its prompt and its text, which are put
    before this prompt. Answers to prompts with images have no `context`, because the images are not in it."""

    prompt: str | None = None
    system: str | None = None
    context: Annotated[Ids, Field(max_length=2**20)] | None = None
    raw: bool | None = None
    suffix: Annotated[Any, Unsupported("")] = None
    template: Annotated[Any, Unsupported("")] = None
    images: Images | None = None
    width: Annotated[Any, Unsupported(0)] = None
    height: Annotated[Any, Unsupported(0)] = None
    steps: Annotated[Any, Unsupported(0)] = None


class OllamaChatRequest(OllamaRequest):
    """The body of `POST /api/chat`."""

    messages: Messages | None = None
    tools: OllamaTools | None = None  # type: ignore[valid-type]


async def generate(context: RequestContext, body: OllamaGenerateRequest) -> ASGIApp:
    entry, logprobs = find_entry(context.server.models, body.model), body.wanted_logprobs()
    if not body.prompt and not body.images:
        return await _without_prompt(context, body, entry, as_response)
    served = await context.use(entry, body.keep_alive_s)
    thinking = thinking_of(body.think)
    prompt = await _encode_prompt(context, served, body, thinking.variables(served))
    ids = prompt if isinstance(prompt, list) else prompt.token_ids
    params = (body.options or OllamaOptions()).params(served, len(ids), logprobs, body.structure())
    if not isinstance(prompt, list):
        params = _with_thinking_budget(thinking, params, served, prompt)
    stateless = bool(body.raw or body.images)

    def last_fields(answer: list[int]) -> dict[str, Any]:
        return {} if stateless else {"context": ids + answer}

    request = GenerateRequest(served, prompt, params, structure_field="format")
    body = body.model_copy(update={"images": None})  # images have megabytes
    return await Lines(context, body, request, as_response, last_fields).response()


async def chat(context: RequestContext, body: OllamaChatRequest) -> ASGIApp:
    entry, logprobs = find_entry(context.server.models, body.model), body.wanted_logprobs()
    if not body.messages:
        return await _without_prompt(context, body, entry, as_message)
    served = await context.use(entry, body.keep_alive_s)
    thinking = thinking_of(body.think)
    messages, offer = for_template(body.messages), offer_of(body.tools or ())
    prompt = await encode_chat(context, served, messages, offer, thinking.variables(served))
    params = (body.options or OllamaOptions()).params(served, len(prompt.token_ids), logprobs, body.structure())
    params = _with_thinking_budget(thinking, params, served, prompt)
    del messages
    body = body.model_copy(update={"messages": None})  # images have megabytes
    return await Lines(context, body, GenerateRequest(served, prompt, params, structure_field="format"), as_message).response()


async def _without_prompt(context: RequestContext, body: OllamaRequest, entry: ModelEntry, fields: ReplyFields) -> ASGIApp:
    """Load the model, or unload it if `keep_alive` is 0."""
    if body.keep_alive_s == 0:
        context.server.manager.unload(entry.slot)
        return reply_without_prompt(body, fields, "unload")
    await context.use(entry, body.keep_alive_s)
    return reply_without_prompt(body, fields, "load")


def _with_thinking_budget(thinking: Thinking, params: SamplingParams, served: ServedModel, prompt: ChatPrompt) -> SamplingParams:
    """The parameters with the reasoning budget of the request. Raises `APIError`, in the words that Ollama's clients know, if the
    request asks a model without reasoning to reason."""
    if thinking.on and prompt.format.reasoning is None:
        raise invalid(f"{served.name!r} does not support thinking", "think", "invalid_value")
    return thinking.held(params, served, prompt)


def routes(server: Server) -> list[Endpoint]:
    answer = Doc("An answer to a prompt", GenerateReply, streams=sse.JSON_LINES)
    message = Doc("The next message of a conversation", ChatReply, streams=sse.JSON_LINES)
    return [
        Endpoint("POST", "/api/generate", generate, OllamaGenerateRequest, answer, server=server, any_type=True, images=True),
        Endpoint("POST", "/api/chat", chat, OllamaChatRequest, message, server=server, any_type=True, images=True),
    ]


async def _encode_prompt(
    context: RequestContext, served: ServedModel, body: OllamaGenerateRequest, variables: Mapping[str, Any]
) -> list[int] | ChatPrompt:
    """Token ids, or a conversation of one message. Raises `APIError`."""
    if body.raw:
        for name in ("system", "context", "images"):
            if getattr(body, name):
                raise invalid(f"{name} is only for prompts that are not raw", name, "invalid_value")
        return await encode_text(served, body.prompt or "")
    if body.images and body.context:
        raise invalid("context: not together with images: send the conversation to /api/chat", "context", "invalid_value")
    system = [{"role": "system", "content": body.system}] if body.system else []
    user: dict[str, Any] = {"role": "user", "content": with_images(body.prompt or "", body.images)}
    prompt = await encode_chat(context, served, [*system, user], variables=variables)
    if not body.context:
        return prompt
    has_bos = prompt.token_ids[:1] == [served.llm.tokenizer.bos_token_id]
    return replace(prompt, token_ids=_checked_ids(served, [*body.context, *prompt.token_ids[has_bos:]]))


def _checked_ids(served: ServedModel, ids: list[int]) -> list[int]:
    """Token ids, of which some come from the client. Raises `APIError` if they are not valid."""
    vocab_size, most = served.llm.loaded.model.vocab_size, served.llm.max_context
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        raise invalid(f"context: token ids are from 0 to {vocab_size - 1}", "context", "invalid_value")
    vision = served.llm.loaded.vision
    if not isinstance(vision, str) and vision.processor.image_token_id in ids:
        raise invalid("context: it has rows of an image: send the conversation to /api/chat", "context", "invalid_value")
    if len(ids) >= most:
        raise TooLong(len(ids), most, "context")
    return ids
