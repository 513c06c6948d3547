"""What a reader of tokenizer files hands to `Tokenizer`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import tokenizers

DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"


@dataclass(frozen=True)
class TokenizerParts:
    """Every id is below `vocab_size`.

    `special_tokens` are the named ones ("bos_token": "<s>"), as chat templates see them; `chat_templates` go by name.
    """

    backend: tokenizers.Tokenizer
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)
