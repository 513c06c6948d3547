"""What a tokenizer's backend must do, the one made of the `tokenizers` library, and that library's errors as ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from typing import Any, Protocol

import tokenizers
from tokenizers import Tokenizer, processors

from ..errors import TokenizerError, one_line
from ..records import dataclass

DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"


class Backend(Protocol):
    """A library that cuts texts into tokens. Safe to share between threads."""

    special: frozenset[int]
    """Ids of control tokens, which are not text and can be skipped when decoding."""

    @property
    def decoder(self) -> tokenizers.decoders.Decoder | None:
        """The decoder that turns tokens into text, or None where tokens are joined by spaces."""
        ...

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids; special tokens spelled in the text are parsed. `add_special_tokens` puts BOS and EOS where the model wants them."""
        ...

    @property
    def token(self) -> Callable[[int], str | None]:
        """From an id to the token as the vocabulary spells it; None for an id outside the vocabulary."""
        ...

    def save(self, path: str) -> None:
        """Write a `tokenizer.json`."""
        ...


@dataclass(frozen=True)
class TokenizerParts:
    """What a reader of tokenizer files finds, for `Tokenizer`."""

    backend: Backend
    """Text to token ids."""
    vocab_size: int
    """Number of token ids; every id is below it."""
    bos_token_id: int | None
    """The id that begins a text, or None."""
    eos_token_ids: frozenset[int]
    """Every id that ends a turn."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Named special tokens ("bos_token": "<s>"), as chat templates see them."""
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """Sources of the chat templates by name: "default", "tool_use", ..."""
    response_template: Mapping[str, Any] | None = None
    """How answers are written, where the checkpoint says so (`response_template` in tokenizer_config.json)."""
    written_by_template: frozenset[int] = frozenset()
    """Ids of tokens that no message but the model's own may spell, besides the special ones."""
    sorts_tools: bool = False
    """Whether the chat template gets tools with their keys in the order of the alphabet."""


@contextmanager
def tokenizer_errors(doing: str) -> Iterator[None]:
    """Raise whatever the Rust library raises as a one-line `TokenizerError`: "`doing` failed: why".

    It raises plain `Exception`, and a panic in it is a `BaseException` of a type that cannot be imported.
    """
    try:
        yield
    except TokenizerError:
        raise
    except Exception as error:
        raise TokenizerError(f"{doing} failed: {one_line(error)}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{doing} failed: {one_line(error)}") from error


class TokenizersBackend:
    """Implements `Backend` with a `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        with tokenizer_errors("setting up the tokenizer"):
            tokenizer.no_truncation()
            tokenizer.no_padding()
            tokenizer.encode("")
            self.decoder = tokenizer.decoder
            self.special = frozenset(token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self.tokenizer = tokenizer
        self.token: Callable[[int], str | None] = tokenizer.id_to_token

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def save(self, path: str) -> None:
        self.tokenizer.save(path, pretty=False)


def frame_texts(backend: Tokenizer, first: int | None, last: int | None) -> None:
    """Put the tokens with these ids around every text that is encoded with special tokens; None for no token."""
    head, tail = ([] if token_id is None else [backend.id_to_token(token_id)] for token_id in (first, last))
    if head or tail:
        known = [(backend.id_to_token(token_id), token_id) for token_id in {first, last} if token_id is not None]
        backend.post_processor = processors.TemplateProcessing(single=[*head, "$A", *tail], special_tokens=known)
