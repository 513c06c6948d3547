"""What a tokenizer's backend must do, the one made of the `tokenizers` library, and that library's errors as ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from typing import Any, Protocol

import tokenizers
from tokenizers import Tokenizer, decoders, processors

from ..errors import TokenizerError, one_line
from ..util.dataclass import dataclass
from .search import TokenSearch

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

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Token ids of a text with a mark inside each special token that it spells and does not mean; nothing is put around it."""
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
    """True if the chat template gets tools with alphabetically sorted keys."""


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
        self._meant: TokenSearch | None = None
        self._plain: Tokenizer | None = None
        self.token: Callable[[int], str | None] = tokenizer.id_to_token

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_marked(self, text: str, mark: str) -> list[int]:
        if self._meant is None:
            self._meant, self._plain = self._without_special_tokens()
        if self._plain is None:
            return encode_parts(self, text, mark)
        ids, stretches, done = [], [], 0
        for begin, end in [*self._meant.find(text), (len(text), len(text))]:
            stretch: list[int] = self._plain.encode(text[done:begin].replace(mark, ""), add_special_tokens=False).ids
            token_id = self.tokenizer.token_to_id(text[begin:end])
            stretches += stretch
            ids += stretch if token_id is None else [*stretch, token_id]
            done = end
        # A word that is the text of a special token is taken whole.
        return ids if self.special.isdisjoint(stretches) else encode_parts(self, text, mark)

    def _without_special_tokens(self) -> tuple[TokenSearch, Tokenizer | None]:
        """Return a search for the special tokens in a text, and the same tokenizer without them.

        The tokenizer is None where the two together would not cut a text as the whole does: with special tokens that swallow spaces or
        that a normalizer changes, and for other kinds than byte-level BPE.
        """
        added = list(self.tokenizer.get_added_tokens_decoder().values())
        normalizer = self.tokenizer.normalizer
        simple = not any(token.lstrip or token.rstrip or token.single_word or (normalizer and token.normalized) for token in added)
        search = TokenSearch(token.content for token in added)
        if not simple or not isinstance(self.decoder, decoders.ByteLevel):
            return search, None
        plain = Tokenizer(self.tokenizer.model)
        plain.pre_tokenizer = self.tokenizer.pre_tokenizer
        if normalizer is not None:
            plain.normalizer = normalizer
        return search, plain

    def save(self, path: str) -> None:
        self.tokenizer.save(path, pretty=False)


def encode_parts(backend: Backend, text: str, mark: str) -> list[int]:
    """As `Backend.encode_marked`, with the parts between marks cut one by one: what was spelled is text, in other tokens than usual."""
    return [token_id for part in text.split(mark) for token_id in backend.encode(part, False)]


def frame_texts(backend: Tokenizer, first: int | None, last: int | None) -> None:
    """Put the tokens with these ids around every text that is encoded with special tokens; None for no token."""
    head, tail = ([] if token_id is None else [backend.id_to_token(token_id)] for token_id in (first, last))
    if head or tail:
        known = [(backend.id_to_token(token_id), token_id) for token_id in {first, last} if token_id is not None]
        backend.post_processor = processors.TemplateProcessing(single=[*head, "$A", *tail], special_tokens=known)
