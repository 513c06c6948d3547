"""Turns prompts and parameters of callers into checked sequences for the engine."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import field, replace
from operator import index
from time import perf_counter
from typing import TYPE_CHECKING, Any, SupportsIndex, TypedDict, Union

from ...cache.base import BidirectionalSpec, sees_spans
from ...errors import ContextLengthError, ImageError, PromptError, SamplingError, UnsupportedModelError
from ...sampling.sampler import sample_seed
from ...structured_output.constraint import Constraint
from ...structured_output.grammar import GrammarCompiler
from ...tokenizer.tokenizer import Tokenizer
from ...tools import OfferedTool, ToolChoice, Tools, chosen, offered
from ...types import SamplingParams
from ...util.dataclass import dataclass
from ...vision.processor import DEFAULT_BUDGET, Budget, ImageProcessor, Layout
from ...vision.prompt import expanded
from ..core.sequence import Sequence
from ..request_keywords import RequestOptions
from .chat_prompt import ChatPrompt, end_of, settled_tokens, spelled_tokens
from .hooks import active_hooks
from .image_inputs import ImageCache, PlannedImage, Rendered, TokensWithImages, encode_with_images, plan, prepare
from .message_parts import ImagePart, Messages, listed, read_messages

if TYPE_CHECKING:
    from ...adapters.adapted_model import LoadedAdapter
    from ...models.decoder import Model
    from ...models.hooks import Hooks
    from ...output_format.format import OutputFormat
    from ...vision.inputs import PromptImages

Prompt = Union[str, Many[int]]
"""Text, or token ids as a list, tuple or array."""


class PromptWithImages(TypedDict):
    """A prompt whose text has one placeholder of the model for each image, or whose token ids have all image rows."""

    prompt: Prompt
    images: Many[Any]


AnyPrompt = Union[Prompt, ChatPrompt, PromptWithImages, TokensWithImages]
PreparedPrompt = Union[list[int], ChatPrompt, TokensWithImages]
"""A prompt whose token ids are known."""

_MOST_MARKS = 4
"""Message boundaries to snapshot; a conversation resumes after one of the last."""
_NEAR = 32
"""Most tokens between two boundaries that share a snapshot."""


@dataclass(frozen=True, slots=True)
class InputProcessor:
    """The properties of a model that its requests need. Any thread may use it."""

    tokenizer: Tokenizer
    """The model's tokenizer, with its chat template."""
    vocab_size: int
    """Token ids are below this."""
    max_context: int
    """Longest sequence, prompt and answer together, in tokens."""
    default_params: SamplingParams
    """Recommended by the model's authors; no field is None."""
    grammars: GrammarCompiler
    """Compiles constraints of answers."""
    tool_format: str | None = None
    """`EngineArgs.tool_format`."""
    model: Model | None = None
    """Interventions are looked up by this object."""
    adapters: Mapping[str, LoadedAdapter] = field(default_factory=dict)
    """Adapters that requests can use, by name."""
    vision: ImageProcessor | str = "the model cannot see images"
    """Pre-processing of images, or a sentence with the reason why the model cannot see."""
    budget: Budget = DEFAULT_BUDGET
    """Limits of all images; those of a request stay within."""
    image_cache: ImageCache = field(default_factory=ImageCache, repr=False, compare=False)
    """Images of earlier requests, pre-processed."""

    def token_ids(self, prompt: Prompt, images: Many[PlannedImage] = ()) -> list[int]:
        """Token ids of a prompt with these images. Raises `PromptError` if it is empty, too long or has ids outside the vocabulary."""
        ids = self.check(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt, images)
        if len(ids) >= self.max_context:
            message = (
                f"{_length(ids, images)}, which leaves no room for an answer in the context of {self.max_context}: "
                f"{'scale the images down with max_pixels, or leave some out' if images else 'shorten it'}"
            )
            raise ContextLengthError(message, len(ids), self.max_context, _image_tokens(images))
        return ids

    def scored_ids(self, prompt: Prompt) -> list[int]:
        """`token_ids` of a text that may fill the whole context."""
        check_text_only([prompt])
        return self.check(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)

    @property
    def output_format(self) -> OutputFormat:
        """The model's format of reasoning and calls. Raises `MLXInferError` for an unknown `tool_format`."""
        from ...output_format.detect import output_format  # only where there are chats

        return output_format(self.tokenizer, self.tool_format, self.tokenizer.response_template)

    def chat(
        self,
        messages: Messages,
        tools: Iterable[OfferedTool] | None = None,
        tool_choice: str | ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        template_vars: Mapping[str, Any] | None = None,
        images: Iterable[Any] = (),
    ) -> ChatPrompt:
        """Render a conversation with the model's template, and read its images.

        `tool_choice`: "auto", "none", "required" or a tool's name. `images` come first in the last user message. Raises `PromptError`,
        `ImageError` that names the part, and `TemplateError`.
        """
        rendered = self.rendered(messages, tools, tool_choice, parallel_tool_calls, template_vars, images)
        found = self._read_images(rendered.prompt.token_ids, rendered.images)
        return replace(rendered.prompt, images=found) if found else rendered.prompt

    def rendered(
        self,
        messages: Messages,
        tools: Iterable[OfferedTool] | None = None,
        tool_choice: str | ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        template_vars: Mapping[str, Any] | None = None,
        images: Iterable[Any] = (),
    ) -> Rendered:
        """`chat` without decoding the images: their tokens follow from the sizes in their headers."""
        from ...output_format.history import messages_for_template

        tokenizer = self.tokenizer
        plain, parts = read_messages(messages, images)
        planned = self._planned(parts)
        known = offered(tools)
        choice = chosen(tool_choice, known, parallel=parallel_tool_calls)
        callable_tools: Tools = {} if choice.mode == "none" else known
        form = self.output_format
        for_template, described = messages_for_template(form, plain, callable_tools)
        template = {"tools": described or None, **(template_vars or {})}
        if planned and not isinstance(self.vision, str):
            encoded = encode_with_images(tokenizer, for_template, self.vision, [each.layout for each in planned], **template)
        else:
            encoded = tokenizer.encode_chat(for_template, **template)
        ids = self.token_ids(encoded, planned)
        settled = settled_tokens(ids, tokenizer, template_vars or {})
        end, spelled = end_of(ids, tokenizer, form), spelled_tokens(tokenizer, form)
        return Rendered(ChatPrompt(ids, form, callable_tools, choice, end, spelled, settled), planned)

    def prepared(self, prompt: AnyPrompt) -> PreparedPrompt:
        """A prompt as `sequences` takes it. Raises `PromptError`."""
        if isinstance(prompt, (ChatPrompt, TokensWithImages)):
            return prompt
        if not isinstance(prompt, Mapping):
            return self.token_ids(prompt)
        text, sources = prompt_and_images(prompt)
        planned = self._planned([ImagePart(f"images[{number}]", source, {}) for number, source in enumerate(sources)])
        if planned and isinstance(text, str) and not isinstance(self.vision, str):
            text = expanded(text, self.vision, [each.layout for each in planned], chat=False)
        ids = self.token_ids(text, planned)
        images = self._read_images(ids, planned)
        return TokensWithImages(ids, images) if images else ids

    def image_layout(self, image: Any) -> Layout:
        """The place of an image in a prompt, by the size in its header. Raises `ImageError`."""
        return self._planned([ImagePart("image", image, {})])[0].layout

    def _planned(self, parts: Many[ImagePart]) -> list[PlannedImage]:
        """The images with their sizes and tokens. Raises `ImageError`, also for a model that cannot see."""
        if not parts:
            return []
        if isinstance(self.vision, str):
            raise ImageError(f"{parts[0].where}: {self.vision}")
        return [plan(part, self.vision, self.budget) for part in parts]

    def _read_images(self, ids: list[int], planned: Many[PlannedImage]) -> PromptImages | None:
        """Decode the images of a prompt with these token ids; None for text. Raises `PromptError`."""
        if not planned or isinstance(self.vision, str):
            return None
        from ...vision.inputs import PromptImages

        began = perf_counter()
        images = [prepare(each, self.vision, self.image_cache) for each in planned]
        mrope, spans = (self.model.mrope, sees_spans(self.model.layers)) if self.model is not None else (False, False)
        found = PromptImages.of(ids, images, self.vision.image_token_id, mrope=mrope, spans=spans)
        return replace(found, prepare_s=perf_counter() - began)

    def check(self, ids: Many[int], images: Many[PlannedImage] = ()) -> list[int]:
        """Checked token ids as a list of ints. Raises `PromptError`."""
        ids = _as_list(ids)
        if not ids:
            raise PromptError("the prompt is empty")
        if len(ids) > self.max_context:
            message = f"{_length(ids, images)}, which do not fit in the context of {self.max_context}: shorten the prompt"
            raise ContextLengthError(message, len(ids), self.max_context, _image_tokens(images))
        image = None if isinstance(self.vision, str) else self.vision.image_token_id
        if image is not None and not images and image in ids:
            raise PromptError(
                f"token {ids.index(image)} of the prompt ({image}) stands for an image: give the images with it, as "
                '{"prompt": ..., "images": [...]} in Python, or as parts of chat messages over HTTP'
            )
        known = [token for token in ids if token != image] if images else ids
        if all(type(token) is int for token in ids) and min(known, default=0) >= 0 and max(known, default=0) < self.vocab_size:
            return ids
        for i, token in enumerate(ids):
            number = index(token) if isinstance(token, SupportsIndex) and not isinstance(token, bool) else -1
            if not 0 <= number < self.vocab_size and not (images and number == image):
                raise PromptError(f"token id {token!r} is not one of the model's (0 to {self.vocab_size - 1})")
            ids[i] = number
        return ids

    def params(self, params: SamplingParams | None) -> SamplingParams:
        """Parameters with missing fields from `default_params`. Raises `SamplingError` for other types."""
        if params is None:
            return self.default_params
        if isinstance(params, SamplingParams):
            return params.resolved(self.default_params)
        example = ", ".join(f"{name}={value!r}" for name, value in params.items()) if isinstance(params, dict) else "temperature=0"
        raise SamplingError(f"params must be SamplingParams({example}), not a {type(params).__name__}")

    def all_params(self, params: SamplingParams | Many[SamplingParams] | None, count: int) -> list[SamplingParams]:
        """Parameters of each of `count` prompts, from one object or a list. Raises `SamplingError`."""
        if not isinstance(params, (list, tuple)):
            return [self.params(params)] * count  # type: ignore[arg-type]
        if len(params) != count:
            raise SamplingError(f"{len(params)} params for {count} prompts: give one SamplingParams for all, or a list with one for each")
        return [self.params(each) for each in params]

    def sequences(self, prompt: PreparedPrompt, params: SamplingParams | None, options: RequestOptions) -> list[Sequence]:
        """The `n` sequences of a request; the others fork from the first. Raises `SamplingError` for a biased id outside the vocabulary
        and for an impossible structure. Checking a structure may take a few hundred milliseconds."""
        self._check_causal()
        chat = prompt if isinstance(prompt, ChatPrompt) else None
        ids, images = (prompt, None) if isinstance(prompt, list) else (prompt.token_ids, prompt.images)
        params = self.params(params)
        if params.logit_bias and max(params.logit_bias) >= self.vocab_size:
            raise SamplingError(f"logit_bias: {max(params.logit_bias)} is not one of the model's token ids (0 to {self.vocab_size - 1})")
        seed = int.from_bytes(os.urandom(8), "little") if params.seed is None else params.seed
        limit = min(len(ids) + (params.max_tokens or self.max_context), self.max_context)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.tokenizer.eos_token_ids)
        constraint, hooks = self._constraint(params, chat), active_hooks(self.model)
        snapshot_points = resume_points(ids, self.tokenizer.eos_token_ids, chat.settled if chat else 0)
        adapter = self.adapter(params.adapter if options.adapter is None else options.adapter)
        sequences = [
            Sequence(
                ids,
                params,
                sample_seed(seed, i),
                limit,
                stop_ids,
                i,
                cache_salt=options.cache_salt,
                client_id=options.client_id,
                priority=options.priority,
                deadline=options.deadline,
                snapshot_points=snapshot_points,
                constraint=constraint and constraint.copy(),
                chat=chat if chat is not None and chat.has_parts else None,
                hooks=hooks,
                adapter=adapter,
                images=images,
            )
            for i in range(params.n)
        ]
        sequences[0].lead(sequences[1:])
        return sequences

    @property
    def is_causal(self) -> bool:
        """True if no token attends to later ones, so that the model can generate."""
        return self.model is None or not any(isinstance(spec, BidirectionalSpec) for spec in self.model.layers)

    def _check_causal(self) -> None:
        if not self.is_causal:
            raise UnsupportedModelError("this model reads texts from both ends and writes none: use embed")

    def _constraint(self, params: SamplingParams, chat: ChatPrompt | None) -> Constraint | None:
        """The constraint of an answer; None for free text."""
        if chat is None or not (chat.tools or params.structure or params.thinking_token_budget is not None):
            return None if params.structure is None else self.grammars.compile(params.structure)
        from ...structured_output.answer_constraint import AnswerRules

        rules = AnswerRules(chat.format, chat.tools, chat.choice, chat.begun, params.structure, params.thinking_token_budget)
        return rules.constraint(self.grammars, self.vocab_size)

    def traced(self, prompt: AnyPrompt) -> tuple[list[int], PromptImages | None]:
        """Token ids of a prompt to trace, and its images. Raises `PromptError`."""
        if isinstance(prompt, (Mapping, ChatPrompt, TokensWithImages)):
            prompt = self.prepared(prompt)
            return (prompt, None) if isinstance(prompt, list) else (prompt.token_ids, prompt.images)
        return self.scored_ids(prompt), None

    def scored(
        self, ids: list[int], top: int | None, options: RequestOptions, hooks: Hooks | None = None, images: PromptImages | None = None
    ) -> Sequence:
        """A sequence to score: logits of its tokens, and log-probabilities with those of the `top` likeliest (0 to 64). None for `top`
        computes logits only. `hooks` replace the active ones."""
        self._check_causal()
        return Sequence(
            ids,
            SamplingParams(logprobs=top).resolved(),
            seed=0,
            max_length=len(ids),
            wants_logits=True,
            cache_salt=options.cache_salt,
            client_id=options.client_id,
            priority=options.priority,
            deadline=options.deadline,
            hooks=hooks or active_hooks(self.model),
            adapter=self.adapter(options.adapter),
            images=images,
        )

    def adapter(self, name: str | None) -> LoadedAdapter | None:
        """The adapter of this name; None for None. Raises `SamplingError` for an unknown name."""
        if name is None:
            return None
        found = self.adapters.get(name) if isinstance(name, str) else None
        if found is None:
            known = f"there are {', '.join(self.adapters)}" if self.adapters else "the model was loaded without adapters"
            raise SamplingError(f"adapter: there is none called {name!r}; {known}")
        return found


def as_prompts(prompts: AnyPrompt | Many[AnyPrompt]) -> list[AnyPrompt]:
    """One or many prompts as a list."""
    if isinstance(prompts, (str, ChatPrompt, TokensWithImages, Mapping)):
        return [prompts]  # type: ignore[list-item]
    items: list[Any] = _as_list(prompts)
    return [items] if items and not isinstance(items[0], (Iterable, ChatPrompt, TokensWithImages)) else items


def check_text_only(prompts: Iterable[Any]) -> None:
    """Raise `PromptError` for prompts that may have images: logits, scores and vectors are those of texts."""
    if any(isinstance(prompt, (Mapping, ChatPrompt, TokensWithImages)) for prompt in prompts):
        raise PromptError("only text or token ids can be read here: prompts with images are for generate, stream, chat and trace")


def prompt_and_images(prompt: PromptWithImages) -> tuple[Prompt, list[Any]]:
    """The text or token ids of a prompt, and its images. Raises `PromptError`."""
    given: Mapping[str, Any] = prompt
    if "prompt" not in given or given.keys() - {"prompt", "images"}:
        raise PromptError(f'a prompt with images is {{"prompt": text, "images": [...]}}, not a dict with {", ".join(map(repr, given))}')
    return given["prompt"], listed(given.get("images") or ())


def _image_tokens(images: Many[PlannedImage]) -> int:
    return sum(each.layout.tokens for each in images)


def _length(ids: Many[int], images: Many[PlannedImage]) -> str:
    """The length of a prompt for error messages."""
    if not images:
        return f"the prompt has {len(ids)} tokens"
    count = len(images)
    return f"the prompt has {len(ids)} tokens, {_image_tokens(images)} of them for {count} image{'s' if count > 1 else ''}"


def _as_list(values: Any) -> list[Any]:
    """The items of a list, tuple or array. Raises `PromptError`."""
    items = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(items, Mapping) or not isinstance(items, Iterable):
        raise PromptError(f"a prompt is text or a list of token ids, not {type(values).__name__}")
    return list(items)


def message_ends(ids: Iterable[int], end_tokens: Collection[int]) -> list[int]:
    """Lengths of the prompt at which messages end."""
    return [i for i, token in enumerate(ids, 1) if token in end_tokens]


def resume_points(ids: Many[int], end_tokens: Collection[int], settled: int) -> tuple[int, ...]:
    """Lengths of the prompt at which the next prompt of the conversation may resume: the last ends of messages, and `settled` if no end is
    near it."""
    ends = [end for end in message_ends(ids, end_tokens) if end < len(ids)]
    if settled and not any(settled - _NEAR <= end <= settled for end in ends[-1:]):
        ends.append(settled)
    return tuple(sorted(ends)[-_MOST_MARKS:])


def with_message(miss: str, ids: Many[int], end_tokens: Collection[int]) -> str:
    """The reason of a cache miss, with the number of the message in which the cached text ends, if there are messages."""
    found = re.search(r"token (\d+)", miss)
    if not found:
        return miss
    ends = message_ends(ids, end_tokens)
    return f"{miss}, message {1 + sum(end <= int(found[1]) for end in ends)}" if ends else miss
