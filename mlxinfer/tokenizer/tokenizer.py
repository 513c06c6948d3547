"""Converts text to token ids and back, and messages to prompts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import PromptError
from .backend import TokenizerParts, tokenizer_errors
from .chat_template import ChatTemplates, SpecialTokens, sorted_keys
from .detokenizer import Detokenizer, TokenBytes
from .gguf import read_gguf


class Tokenizer:
    """Tokenizer of one model. Thread-safe."""

    vocab_size: int
    """Number of token ids. The model's embedding may have more rows."""
    bos_token_id: int | None
    """Id of BOS, or None."""
    eos_token_ids: frozenset[int]
    """Ids that end a turn."""

    def __init__(self, parts: TokenizerParts) -> None:
        with tokenizer_errors("setting up the tokenizer"):
            self._token_bytes = TokenBytes(parts.backend)
        self._parts = parts
        self._backend = parts.backend
        self._special_tokens = SpecialTokens(
            *(filter(None, map(parts.backend.token, ids)) for ids in (parts.backend.special, parts.written_by_template))
        )
        self._templates = ChatTemplates(parts.chat_templates, parts.special_tokens)
        self.vocab_size = parts.vocab_size
        self.bos_token_id = parts.bos_token_id
        self.eos_token_ids = parts.eos_token_ids

    @property
    def chat_template(self) -> str | None:
        """Source of the default chat template; None without one."""
        return self._templates.default

    @property
    def template_variables(self) -> frozenset[str]:
        """Variables that the chat templates read, such as "messages" and "enable_thinking". Raises `TemplateError`."""
        return self._templates.variables

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        """The checkpoint's declaration of its answer format; None without one."""
        return self._parts.response_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return token ids. Special tokens in the text are parsed; BOS is added as the model requires.

        Raises `PromptError` for a text that is not Unicode (a lone surrogate).
        """
        _check_unicode(text)
        with tokenizer_errors("tokenizing the prompt"):
            return self._backend.encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of these ids. Ids outside the vocabulary are skipped."""
        detokenizer = Detokenizer(self._token_bytes, skip_special_tokens=skip_special_tokens)
        return "".join(map(detokenizer.add, ids)) + detokenizer.finish()

    def token_text(self, token_id: int) -> str:
        """Return the text of a single token, with U+FFFD for bytes of an incomplete character."""
        return (self._token_bytes.token_bytes(token_id) or b"").decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of a token inside a text; None for an id outside the vocabulary."""
        return self._token_bytes.token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        """Return True for a control token, which has no text."""
        return self._token_bytes.is_special(token_id)

    def detokenizer(self, spelled: Collection[int] = ()) -> Detokenizer:
        """Return a new incremental detokenizer, which skips special tokens except those in `spelled`."""
        return Detokenizer(self._token_bytes, spelled=spelled)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt text of a conversation. `variables` reach the template (`enable_thinking=False`). Raises `TemplateError`."""
        if self._parts.sorts_tools and tools:
            tools = [sorted_keys(tool) for tool in tools]
        return self._templates.render(messages, tools, {"add_generation_prompt": add_generation_prompt, **variables})

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        expand: Callable[[str], str] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Return the token ids of a conversation. Special tokens come from the template only; those in messages are encoded as text.

        `expand` receives the rendered text and returns the text to encode, with the placeholders of images expanded. Special tokens that
        messages spell are marked in it and do not match a placeholder.
        """
        (messages, tools), mark = self._special_tokens.escape_special_tokens((messages, tools))
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, tools=tools, **variables)
        text = expand(text) if expand is not None else text
        if not mark:
            return self.encode(text, add_special_tokens=False)
        _check_unicode(text)
        with tokenizer_errors("tokenizing the prompt"):
            return self._backend.encode_marked(text, mark)

    def save(self, directory: Path) -> None:
        """Write files that transformers' and mlx-lm's AutoTokenizer can load."""
        from .huggingface import save_tokenizer

        save_tokenizer(self._parts, directory)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"the prompt is not valid Unicode: a lone surrogate at character {error.start}") from None


def from_directory(path: Path) -> Tokenizer:
    """Return the tokenizer of a Hugging Face or MLX model directory. Raises `TokenizerError`."""
    from .huggingface import read_directory  # lazy: a GGUF file does not need it

    return Tokenizer(read_directory(path))


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer in a GGUF file's metadata: key to str, int, float, bool, list of str, numpy array or list.

    Raises `TokenizerError`.
    """
    return Tokenizer(read_gguf(metadata))
