"""Turns prompts and parameters of callers into checked sequences for the engine."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import field
from operator import index
from typing import TYPE_CHECKING, Any, SupportsIndex, Union

from ...cache.base import BidirectionalSpec
from ...errors import ContextLengthError, PromptError, SamplingError, UnsupportedModelError
from ...sampling.sampler import sample_seed
from ...structured_output.constraint import Constraint
from ...structured_output.grammar import GrammarCompiler
from ...tokenizer.tokenizer import Tokenizer
from ...tools import OfferedTool, ToolChoice, Tools, chosen, offered
from ...types import SamplingParams
from ...util.dataclass import dataclass
from ..core.sequence import Sequence
from ..request_keywords import RequestOptions
from .chat_prompt import ChatPrompt, end_of, settled_tokens, spelled_tokens
from .hooks import active_hooks

if TYPE_CHECKING:
    from ...adapters.adapted_model import LoadedAdapter
    from ...models.decoder import Model
    from ...models.hooks import Hooks
    from ...output_format.format import OutputFormat

Prompt = Union[str, Many[int]]
"""Text, or token ids as a list, tuple or array."""
AnyPrompt = Union[Prompt, ChatPrompt]
PreparedPrompt = Union[list[int], ChatPrompt]
"""A prompt whose token ids are known."""
Messages = Union[str, Many[Mapping[str, Any]]]
"""A conversation of `{"role": ..., "content": ...}`, where the content is text or a list of `{"type": "text", "text": ...}` parts. Text
alone is the user's first message."""

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

    def token_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises `PromptError` if it is empty, too long or has ids outside the vocabulary."""
        ids = self.scored_ids(prompt)
        if len(ids) >= self.max_context:
            message = (
                f"the prompt has {len(ids)} tokens, which leaves no room for an answer in the context of {self.max_context}: shorten it"
            )
            raise ContextLengthError(message, len(ids), self.max_context)
        return ids

    def scored_ids(self, prompt: Prompt) -> list[int]:
        """`token_ids` of a prompt that may fill the whole context."""
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
    ) -> ChatPrompt:
        """Render a conversation with the model's template. `tool_choice`: "auto", "none", "required" or a tool's name. Raises
        `PromptError` and `TemplateError`."""
        from ...output_format.history import messages_for_template

        tokenizer, plain = self.tokenizer, plain_messages(messages)
        known = offered(tools)
        choice = chosen(tool_choice, known, parallel=parallel_tool_calls)
        callable_tools: Tools = {} if choice.mode == "none" else known
        form = self.output_format
        for_template, described = messages_for_template(form, plain, callable_tools)
        ids = self.token_ids(tokenizer.encode_chat(for_template, tools=described or None, **(template_vars or {})))
        settled = settled_tokens(ids, tokenizer, template_vars or {})
        return ChatPrompt(ids, form, callable_tools, choice, end_of(ids, tokenizer, form), spelled_tokens(tokenizer, form), settled)

    def prepared(self, prompt: AnyPrompt) -> PreparedPrompt:
        """A prompt as `sequences` takes it. Raises `PromptError`."""
        return prompt if isinstance(prompt, ChatPrompt) else self.token_ids(prompt)

    def check(self, ids: Many[int]) -> list[int]:
        """Checked token ids as a list of ints. Raises `PromptError`."""
        ids = _as_list(ids)
        if not ids:
            raise PromptError("the prompt is empty")
        if len(ids) > self.max_context:
            message = f"{len(ids)} tokens do not fit in the context of {self.max_context}: shorten the prompt"
            raise ContextLengthError(message, len(ids), self.max_context)
        if all(type(token) is int for token in ids) and min(ids) >= 0 and max(ids) < self.vocab_size:
            return ids
        for i, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, SupportsIndex) or not 0 <= index(token) < self.vocab_size:
                raise PromptError(f"token id {token!r} is not one of the model's (0 to {self.vocab_size - 1})")
            ids[i] = index(token)
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
        ids = prompt if isinstance(prompt, list) else prompt.token_ids
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

    def scored(self, ids: list[int], top: int | None, options: RequestOptions, hooks: Hooks | None = None) -> Sequence:
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
    if isinstance(prompts, (str, ChatPrompt)):
        return [prompts]
    items: list[Any] = _as_list(prompts)
    return [items] if items and not isinstance(items[0], (Iterable, ChatPrompt)) else items


def _as_list(values: Any) -> list[Any]:
    """The items of a list, tuple or array. Raises `PromptError`."""
    items = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(items, Mapping) or not isinstance(items, Iterable):
        raise PromptError(f"a prompt is text or a list of token ids, not {type(values).__name__}")
    return list(items)


def plain_messages(messages: Messages) -> list[Mapping[str, Any]]:
    """Messages with joined text parts, as templates expect them. Raises `PromptError`."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if isinstance(messages, Mapping):
        raise PromptError('messages must be a list, such as [{"role": "user", "content": "Hello"}]')
    return [_plain(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _plain(message: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    if not isinstance(message, Mapping):
        raise PromptError(f'{where} must be a dict, such as {{"role": "user", "content": "Hello"}}, not a {type(message).__name__}')
    parts = message.get("content")
    if not isinstance(parts, (list, tuple)):
        return message
    for number, part in enumerate(parts):
        if not isinstance(part, Mapping) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise PromptError(f"{where}: content[{number}] is {kind!r}, and only text parts can be read")
    return {**message, "content": "".join(part["text"] for part in parts)}


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
