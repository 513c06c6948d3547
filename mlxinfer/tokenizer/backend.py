"""Tokenizer backends: their protocol, the one over the `tokenizers` library, and its errors as `TokenizerError`."""

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
    """Converts texts to token ids. Thread-safe."""

    special: frozenset[int]
    """Ids of control tokens, which are not text and may be skipped when decoding."""

    @property
    def decoder(self) -> tokenizers.decoders.Decoder | None:
        """Decoder from tokens to text; None if tokens are joined by spaces."""
        ...

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return token ids. Special tokens in the text are parsed; `add_special_tokens` adds BOS and EOS as the model requires."""
        ...

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Return token ids of a text whose spelled special tokens contain `mark`, which makes them plain text. Adds no BOS or EOS."""
        ...

    @property
    def token(self) -> Callable[[int], str | None]:
        """Function from an id to the vocabulary's token; None for an id outside the vocabulary."""
        ...

    def save(self, path: str) -> None:
        """Write a `tokenizer.json` at `path`."""
        ...


@dataclass(frozen=True)
class TokenizerParts:
    """Result of reading tokenizer files, from which a `Tokenizer` is made."""

    backend: Backend
    vocab_size: int
    """Number of token ids; every id is below it."""
    bos_token_id: int | None
    """Id of BOS, or None."""
    eos_token_ids: frozenset[int]
    """Ids that end a turn."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Named special tokens for chat templates, for example {"bos_token": "<s>"}."""
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """Sources of the chat templates by name: "default", "tool_use", ..."""
    response_template: Mapping[str, Any] | None = None
    """`response_template` of tokenizer_config.json: transformers' declaration of the answer format."""
    written_by_template: frozenset[int] = frozenset()
    """Ids of further tokens that only the model's own messages may spell."""
    sorts_tools: bool = False
    """True if the chat template gets tools with alphabetically sorted keys."""


@contextmanager
def tokenizer_errors(doing: str) -> Iterator[None]:
    """Convert errors of the Rust library to a one-line `TokenizerError`: "`doing` failed: why".

    The library raises plain `Exception`; its panics are a `BaseException` of a type that cannot be imported.
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
        # The vocabulary has the special token as a word, so the library would take it whole.
        return ids if self.special.isdisjoint(stretches) else encode_parts(self, text, mark)

    def _without_special_tokens(self) -> tuple[TokenSearch, Tokenizer | None]:
        """Return a search for special tokens, and the same tokenizer without them.

        The tokenizer is None if the two together would split a text differently: for special tokens that strip spaces or that a normalizer
        changes, and for models other than byte-level BPE.
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
    """Encode as `Backend.encode_marked`, part by part: spelled special tokens become text, split at the marks."""
    return [token_id for part in text.split(mark) for token_id in backend.encode(part, False)]


def frame_texts(backend: Tokenizer, first: int | None, last: int | None) -> None:
    """Add the tokens `first` and `last` around texts that are encoded with special tokens; None adds nothing."""
    head, tail = ([] if token_id is None else [backend.id_to_token(token_id)] for token_id in (first, last))
    if head or tail:
        known = [(backend.id_to_token(token_id), token_id) for token_id in {first, last} if token_id is not None]
        backend.post_processor = processors.TemplateProcessing(single=[*head, "$A", *tail], special_tokens=known)
