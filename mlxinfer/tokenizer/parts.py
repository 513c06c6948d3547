"""What a reader of tokenizer files hands to `Tokenizer`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import tokenizers

DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"


class Backend(Protocol):
    """The library that cuts texts into tokens. Safe to share between threads."""

    special: frozenset[int]
    """Ids of the tokens that are no text."""

    @property
    def decoder(self) -> tokenizers.decoders.Decoder | None:
        """How `tokenizers` makes text of tokens."""
        ...

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def token(self, token_id: int) -> str | None:
        """As the vocabulary has it; None for an id that it has not."""
        ...

    def save(self, path: str) -> None:
        """Write a `tokenizer.json`."""
        ...


@dataclass(frozen=True)
class TokenizerParts:
    """Every id is below `vocab_size`.

    `special_tokens` are the named ones ("bos_token": "<s>"), as chat templates see them; `chat_templates` go by name.
    """

    backend: Backend
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)
