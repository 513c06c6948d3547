"""Structures compiled to matchers of llguidance, over the bytes of a model's own tokens."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import SamplingError, one_line
from ..structure import Choice, Lark, Regex, Schema, Structure
from ..tokenizer.tokenizer import Tokenizer
from ..util.dataclass import dataclass
from .constraint import GrammarConstraint, JSONText
from .deadline import Deadline, TooLongError
from .formatting_drafts import Habits
from .gbnf import gbnf_to_lark, quoted
from .lark_limits import check_lark
from .number_limits import NumberLimit
from .schema import MAX_DEPTH, fault_path, normalized
from .schema_limits import forced_size

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

WHITESPACE = r" |\n[ \t]{0,40}"
"""Between the tokens of JSON. Unbounded whitespace lets a model ramble in it until `max_tokens`."""
_KEPT = 128
"""Compiled grammars that are kept for further requests."""
_LIMITS = {
    "initial_lexer_fuel": 400_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 6_000,
    "max_items_in_row": 4_500,
    "max_grammar_size": 30_000,
}
"""What a grammar and a step may cost llguidance, in its own units. Of a thousand schemas of all kinds none needs more than a third."""
_LIMITS_OF_CLIENTS = {
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 3_000,
    "max_items_in_row": 1_500,
    "max_grammar_size": 6_000,
}
"""The same for expressions and grammars that clients write, which may be ambiguous as no schema is."""
_LONGEST_COMPILE_S = 3.0
"""Seconds that a request waits for its grammar, whatever else runs: all that is known to take long is refused before."""
_MOST_OVERDUE = 2
_LONGEST_FORCED = 4096
"""Bytes that an answer may be forced to have in one piece: they are turned into tokens again and again. Where there may be more, the model
takes them token by token."""
_TOO_BIG = re.compile("too (big|large)|fuel")
"""What is said of a schema as a whole: no part of it is to blame."""
_TOO_DEEP = f"structure: the schema is nested too deeply: {MAX_DEPTH} levels of JSON are allowed"


class _TokenTable:
    """A vocabulary as llguidance asks for it. Its own reader of tokenizer.json takes every added token for a special one, which forbids
    Gemma's HTML tags inside strings."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        ids = range(min(vocab_size, tokenizer.vocab_size))
        self.special_token_ids = [i for i in ids if tokenizer.is_special(i)]
        # Embeddings are often larger than the vocabulary. The library takes the length of this list, not `n_vocab`, for the size.
        self.tokens = [*(tokenizer.token_bytes(i) or b"" for i in ids), *[b""] * (vocab_size - len(ids))]
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
        """`vocab_size`: logits of the model. Cheap: the vocabulary is prepared with the first structure, or by `prepare`."""
        self.tokenizer = tokenizer
        """Whose tokens they are."""
        self._vocab_size = vocab_size
        self._lock = Lock()
        self._table: _Table | None = None
        self._compiled: OrderedDict[tuple[Structure, bool], LLMatcher] = OrderedDict()
        self._deadline: Deadline[LLMatcher] = Deadline(_LONGEST_COMPILE_S, _MOST_OVERDUE)

    def compile(self, structure: Structure, *, own: bool = False) -> GrammarConstraint:
        """What holds an answer to the structure, from its beginning. `own`: a grammar that was written here, not by a client. Raises
        `SamplingError` that names what cannot be held, or would take too long."""
        with self._lock:
            known = self._compiled.get((structure, own))
            if known is not None:
                self._compiled.move_to_end((structure, own))
        if known is not None:
            return self._constraint(known, structure)
        text = structure.grammar if own and isinstance(structure, Lark) else _grammar(structure)
        limits = _LIMITS if own or isinstance(structure, (Schema, Choice)) else _LIMITS_OF_CLIENTS
        matcher = self._matcher(text, limits)
        if matcher.is_error():
            raise SamplingError(_refusal(structure, matcher.get_error()))
        with self._lock:
            self._compiled[structure, own] = matcher
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return self._constraint(matcher, structure)

    def _matcher(self, grammar: str, limits: dict[str, int]) -> LLMatcher:
        """A compiled grammar whose first step has been tried."""
        from llguidance import LLMatcher, LLParserLimits

        tokens, words = self.table(), (self._vocab_size + 31) // 32

        def compiled() -> LLMatcher:
            matcher = LLMatcher(tokens, grammar, log_level=0, limits=LLParserLimits(**limits, verbose_errors=False))  # type: ignore[arg-type]
            if not matcher.is_error():
                row = np.empty(words, np.int32)
                matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            return matcher

        try:
            return self._deadline.run(compiled)
        except TooLongError:
            why = f"it takes more than {_LONGEST_COMPILE_S:g} s to compile, or others still do: make it simpler, or try again later"
            raise SamplingError(f"structure: {why}") from None

    def _constraint(self, matcher: LLMatcher, structure: Structure) -> GrammarConstraint:
        table = self._prepared()
        json, ends = table.json if isinstance(structure, Schema) else None, self.tokenizer.eos_token_ids
        return GrammarConstraint(matcher.deep_copy(), self._vocab_size, json, ends)

    def prepare(self) -> None:
        """Prepare the vocabulary, so that the first structure does not wait for it. Other threads stand still for most of that time."""
        with suppress(SamplingError):  # which the first structure will be told
            self._prepared()

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
    if isinstance(structure, Schema):
        if structure.schema is False:
            raise SamplingError("structure: no JSON fits the schema false")
        return _of_schema(_normalized(structure))
    if isinstance(structure, Regex):
        return _lark(f"start: /{as_lark_regex(structure.pattern)}/", len(structure.pattern))
    if isinstance(structure, Choice):  # one terminal: as words of a grammar, each would be looked at in every step
        options = " | ".join(map(quoted, structure.options))
        return _lark(f"start: CHOICE\nCHOICE: {options}", max(len(option.encode()) for option in structure.options))
    grammar = gbnf_to_lark(structure.grammar) if "::=" in structure.grammar else structure.grammar  # llama.cpp's clients send GBNF
    lark = check_lark(grammar)
    return _lark(lark.text, lark.text_size)


def as_lark_regex(pattern: str) -> str:
    """What stands for an expression between the slashes of Lark."""
    lines = {"\n": r"\n", "\r": r"\r", "/": r"\/"}
    return re.sub(r"(\\[^\n\r])|\\?([/\n\r])", lambda found: found[1] or lines[found[2]], pattern)


def _lark(grammar: str, longest_text: int) -> str:
    """Lark for llguidance. `longest_text`: bytes that an answer may be forced to have in one piece."""
    from llguidance import LLMatcher

    options = '\n%llguidance {"no_forcing": true}\n' if longest_text > _LONGEST_FORCED else ""
    return LLMatcher.grammar_from_lark(grammar + options)


def _normalized(structure: Schema) -> Any:
    try:
        return {} if structure.schema is True else normalized(structure.schema)
    except RecursionError:
        raise SamplingError(_TOO_DEEP) from None


def _of_schema(schema: Any) -> str:
    from llguidance import LLMatcher

    if isinstance(schema, dict) and forced_size(schema) > _LONGEST_FORCED:
        return _lark("start: %json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}), _LONGEST_FORCED + 1)
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": WHITESPACE})
    except ValueError:  # its reader of JSON goes 128 levels deep, whatever they are
        raise SamplingError(_TOO_DEEP) from None


def _refusal(structure: Structure, error: str) -> str:
    """One line that names what cannot be held, and where."""
    if isinstance(structure, Schema):
        schema = _normalized(structure)
        fault = "" if _TOO_BIG.search(error) else _fault(schema)
        path = fault_path(schema, _fault, fault) if fault else ""
        return f"structure: the schema cannot be held{f' at {path}' if path else ''}: {_reason(fault or error)}"
    kind = {Regex: "regex", Choice: "choice", Lark: "grammar"}[type(structure)]
    return f"structure: {kind}: {_reason(error)}"


def _fault(schema: Any) -> str:
    from llguidance import LLMatcher

    return LLMatcher.validate_grammar(_of_schema(schema), None)


def _reason(error: str) -> str:
    if error.startswith("NoExtension"):
        return "there is no text that fits"
    return one_line(error.partition("\n<")[0].replace("Enable 'coerce_one_of' option to approximate oneOf with anyOf", "use anyOf instead"))
