"""Structures compiled to matchers of llguidance, over the bytes of a model's own tokens."""

from __future__ import annotations

import json
from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Any

from ..errors import SamplingError, one_line
from ..records import dataclass
from ..structure import Choice, Lark, Regex, Schema, Structure
from ..tokenizer.tokenizer import Tokenizer
from .constraint import GrammarConstraint, JSONText
from .habits import Habits
from .numbers import NumberLimit
from .schema import MAX_DEPTH, fault_path, normalized

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

WHITESPACE = r" |\n[ \t]{0,40}"
"""Between the tokens of JSON. Unbounded whitespace lets a model ramble in it until `max_tokens`."""
_KEPT = 128
"""Compiled grammars that are kept for further requests."""
_TOO_DEEP = f"structure: the schema is nested too deeply: {MAX_DEPTH} levels of JSON are allowed"


class _TokenTable:
    """A vocabulary as llguidance asks for it. Its own reader of tokenizer.json takes every added token for a special one, which forbids
    Gemma's HTML tags inside strings."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        ids = range(min(vocab_size, tokenizer.vocab_size))
        self.special_token_ids = [i for i in ids if tokenizer.is_special(i)]
        self.tokens = [tokenizer.token_bytes(i) or b"" for i in ids]
        self.eos_token_id = min(tokenizer.eos_token_ids, default=0)
        self.bos_token_id = tokenizer.bos_token_id
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("texts only")
        return self._tokenizer.encode(text, add_special_tokens=False)


@dataclass(frozen=True, slots=True)
class _Table:
    """What is prepared of a vocabulary."""

    tokens: LLTokenizer
    """As llguidance needs it."""
    json: JSONText
    """For answers that are JSON."""


class GrammarCompiler:
    """Compiles structures for one model. Any thread may use it; it lets other threads run meanwhile."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size`: logits of the model. Cheap: the vocabulary is prepared with the first structure (0.1 s for 49,000 tokens)."""
        self.tokenizer = tokenizer
        """Whose tokens they are."""
        self._vocab_size = vocab_size
        self._lock = Lock()
        self._table: _Table | None = None
        self._compiled: OrderedDict[Structure, LLMatcher] = OrderedDict()

    def compile(self, structure: Structure) -> GrammarConstraint:
        """What holds an answer to the structure, from its beginning. Raises `SamplingError` that names what cannot be held."""
        from llguidance import LLMatcher

        with self._lock:
            known = self._compiled.get(structure)
            if known is not None:
                self._compiled.move_to_end(structure)
        if known is not None:
            return self._constraint(known, structure)
        matcher = LLMatcher(self.table(), _grammar(structure), log_level=0)
        if matcher.is_error():
            raise SamplingError(_refusal(structure, matcher.get_error()))
        with self._lock:
            self._compiled[structure] = matcher
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return self._constraint(matcher, structure)

    def _constraint(self, matcher: LLMatcher, structure: Structure) -> GrammarConstraint:
        table = self._prepared()
        return GrammarConstraint(matcher.deep_copy(), self._vocab_size, table.json if isinstance(structure, Schema) else None)

    def table(self) -> LLTokenizer:
        """The prepared vocabulary. Raises `SamplingError` where the tokenizer cannot be used."""
        return self._prepared().tokens

    def _prepared(self) -> _Table:
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._lock:
            if self._table is None:
                if not self.tokenizer.eos_token_ids:
                    raise SamplingError("structure: the model's tokenizer has no end token, so a structured answer could not end")
                known = _TokenTable(self.tokenizer, self._vocab_size)
                ends = sorted(self.tokenizer.eos_token_ids)
                tokens = LLTokenizer(TokenizerWrapper(known), n_vocab=self._vocab_size, eos_token=ends)  # type: ignore[arg-type]
                self._table = _Table(tokens, JSONText(NumberLimit(known.tokens, self._vocab_size), Habits(known.tokens)))
            return self._table


def _grammar(structure: Structure) -> str:
    """The text that llguidance compiles."""
    from llguidance import LLMatcher

    if isinstance(structure, Schema):
        if structure.schema is False:
            raise SamplingError("structure: no JSON fits the schema false")
        return _of_schema(_normalized(structure))
    if isinstance(structure, Regex):
        return LLMatcher.grammar_from_regex(structure.pattern)
    if isinstance(structure, Choice):
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(option, ensure_ascii=False) for option in structure.options))
    return LLMatcher.grammar_from_lark(_as_lark(structure.grammar))


def _as_lark(grammar: str) -> str:
    """llama.cpp's clients send GBNF, whose rules are written with `::=`."""
    from llguidance import gbnf_to_lark

    if "::=" not in grammar:
        return grammar
    try:
        return str(gbnf_to_lark.gbnf_to_lark(grammar))
    except Exception as error:  # noqa: BLE001  whatever its parser raises
        raise SamplingError(f"structure: grammar: it is not GBNF: {one_line(error)}") from None


def _normalized(structure: Schema) -> Any:
    try:
        return {} if structure.schema is True else normalized(structure.schema)
    except RecursionError:
        raise SamplingError(_TOO_DEEP) from None


def _of_schema(schema: Any) -> str:
    from llguidance import LLMatcher

    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": WHITESPACE})
    except ValueError:  # its reader of JSON goes 128 levels deep, whatever they are
        raise SamplingError(_TOO_DEEP) from None


def _refusal(structure: Structure, error: str) -> str:
    """One line that names what cannot be held, and where."""
    if isinstance(structure, Schema):
        schema = _normalized(structure)
        fault = _fault(schema)
        path = fault_path(schema, _fault, fault)
        return f"structure: the schema cannot be held{f' at {path}' if path else ''}: {_reason(fault or error)}"
    kind = {Regex: "regex", Choice: "choice", Lark: "grammar"}[type(structure)]
    return f"structure: {kind}: {_reason(error)}"


def _fault(schema: Any) -> str:
    from llguidance import LLMatcher

    return LLMatcher.validate_grammar(_of_schema(schema), None)


def _reason(error: str) -> str:
    return one_line(error.replace("Enable 'coerce_one_of' option to approximate oneOf with anyOf", "use anyOf instead"))
