"""Text to token ids and back, and messages to prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .detokenizer import Detokenizer


class Tokenizer:
    """The tokenizer of one model."""

    vocab_size: int
    """Ids from 0 to here decode."""
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    """Every id that ends a turn."""
    chat_template: str | None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Special-token strings in the text are parsed as such; BOS is added where the model wants it."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        raise NotImplementedError

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself, as well as it can be shown."""
        raise NotImplementedError

    def detokenizer(self) -> Detokenizer:
        """A new incremental detokenizer; special tokens are skipped."""
        raise NotImplementedError

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation. Raises `TemplateError`."""
        raise NotImplementedError

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """The token ids of a conversation, with the special tokens of the template and no others."""
        raise NotImplementedError

    def save(self, directory: Path) -> None:
        """Write the files from which transformers' and mlx-lm's AutoTokenizer load this tokenizer."""
        raise NotImplementedError


def from_directory(path: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face or MLX model directory. Raises `TokenizerError`."""
    raise NotImplementedError


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer in a GGUF file's metadata: key to value (str, int, float, bool, list of str, numpy array or list).

    Raises `TokenizerError`.
    """
    raise NotImplementedError
