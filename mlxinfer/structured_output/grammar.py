"""Compiles structures to llguidance matchers over the bytes of a model's tokens."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from ..errors import SamplingError, one_line
from ..structure import Choice, Lark, Regex, Schema, Structure
from ..tokenizer.tokenizer import Tokenizer
from ..util.dataclass import dataclass
from .constraint import GrammarConstraint, JSONText
from .formatting_drafts import FormattingDrafts
from .gbnf import gbnf_to_lark, quoted
from .lark_limits import check_lark
from .number_limits import NumberLimit
from .schema import MAX_DEPTH, fault_path, normalized
from .schema_limits import forced_size

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

WHITESPACE = r" |\n[ \t]{0,40}"
"""Whitespace between JSON tokens. A model may fill unbounded whitespace until `max_tokens`."""
_KEPT = 128
"""Number of compiled grammars in the cache."""
_LIMITS = {
    "initial_lexer_fuel": 400_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 6_000,
    "max_items_in_row": 4_500,
    "max_grammar_size": 30_000,
}
"""Cost limits of a grammar and a step, in llguidance's units: three times the maximum of a thousand schemas of all kinds."""
_LIMITS_OF_CLIENTS = {
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 3_000,
    "max_items_in_row": 1_500,
    "max_grammar_size": 6_000,
}
"""Cost limits for clients' expressions and grammars, which may be ambiguous, unlike schemas."""
_LONGEST_COMPILE_S = 3.0
"""Seconds that a request waits for its grammar. Structures that are known to be slow are refused earlier."""
_MOST_OVERDUE = 2
_LONGEST_FORCED = 4096
"""Maximum number of forced bytes, because they are tokenized at each step. Longer texts are generated token by token."""
_TOO_BIG = re.compile("too (big|large)|fuel")
"""Errors about a schema as a whole, for which no part is searched."""
_TOO_DEEP = f"structure: the schema is nested too deeply: {MAX_DEPTH} levels of JSON are allowed"


T = TypeVar("T")


class TooLongError(Exception):
    """The work is not done in time, or cannot start because too much other work is overdue."""


class Deadline(Generic[T]):
    """Runs uninterruptible work in a thread and waits for it with a limit. Thread-safe."""

    def __init__(self, seconds: float, most_overdue: int) -> None:
        """Wait at most `seconds` for a result. No further work is started while `most_overdue` calls are overdue."""
        self._seconds = seconds
        self._most_overdue = most_overdue
        self._lock = Lock()
        self._overdue = 0

    def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which must not raise. Raises `TooLongError`."""
        with self._lock:
            if self._overdue >= self._most_overdue:
                raise TooLongError
        call = _Call(work)
        thread = Thread(target=self._finish, args=(call,), name="mlxinfer-compile", daemon=True)
        thread.start()
        thread.join(self._seconds)
        with self._lock:
            if not call.done:
                call.overdue = True
                self._overdue += 1
        if call.overdue:
            raise TooLongError
        if not call.results:
            raise RuntimeError("it broke off")  # `threading.excepthook` has reported the exception
        return call.results[0]

    def _finish(self, call: _Call[T]) -> None:
        try:
            call.results.append(call.work())
        finally:
            with self._lock:
                call.done = True
                self._overdue -= call.overdue


class _Call(Generic[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        self.work = work
        self.results: list[T] = []
        self.done = self.overdue = False


class _TokenTable:
    """A vocabulary in the form that llguidance expects.

    llguidance's reader of tokenizer.json treats every added token as special, which would forbid Gemma's HTML tags inside strings.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        ids = range(min(vocab_size, tokenizer.vocab_size))
        self.special_token_ids = [i for i in ids if tokenizer.is_special(i)]
        # Embeddings are often larger than the vocabulary. The library uses the length of this list as the size, not `n_vocab`.
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
    """Prepared vocabulary."""

    tokens: LLTokenizer
    """Tokens in llguidance's form."""
    json: JSONText
    """State for answers in JSON."""


class GrammarCompiler:
    """Compiles structures for one model. Thread-safe; other threads run during a compilation."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Create a compiler for `vocab_size` logits. The vocabulary is prepared with the first structure or by `prepare`."""
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = Lock()
        self._table: _Table | None = None
        self._compiled: OrderedDict[tuple[Structure, bool], LLMatcher] = OrderedDict()
        self._deadline: Deadline[LLMatcher] = Deadline(_LONGEST_COMPILE_S, _MOST_OVERDUE)

    def compile(self, structure: Structure, *, own: bool = False) -> GrammarConstraint:
        """Return a constraint for a new answer. `own` marks grammars generated by this package.

        Raises `SamplingError` that names the unsupported part, or for a structure that takes too long to compile.
        """
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
        """Compile a grammar and compute its first mask."""
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
        """Prepare the vocabulary before the first structure needs it. Most of the time other threads are blocked."""
        with suppress(SamplingError):  # the first structure raises it again
            self._prepared()

    def table(self) -> LLTokenizer:
        """Return the prepared vocabulary. Raises `SamplingError` if the tokenizer has no EOS token."""
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
                self._table = _Table(tokens, JSONText(NumberLimit(known.tokens, self._vocab_size), FormattingDrafts(known.tokens)))
            return self._table


def _grammar(structure: Structure) -> str:
    """Return the text that llguidance compiles."""
    if isinstance(structure, Schema):
        if structure.schema is False:
            raise SamplingError("structure: no JSON fits the schema false")
        return _of_schema(_normalized(structure))
    if isinstance(structure, Regex):
        return _lark(f"start: /{as_lark_regex(structure.pattern)}/", len(structure.pattern))
    if isinstance(structure, Choice):  # one terminal, because each option of a rule would cost time in every step
        options = " | ".join(map(quoted, structure.options))
        return _lark(f"start: CHOICE\nCHOICE: {options}", max(len(option.encode()) for option in structure.options))
    grammar = gbnf_to_lark(structure.grammar) if "::=" in structure.grammar else structure.grammar  # llama.cpp's clients send GBNF
    lark = check_lark(grammar)
    return _lark(lark.text, lark.text_size)


def as_lark_regex(pattern: str) -> str:
    """Return an expression escaped for Lark's slashes."""
    lines = {"\n": r"\n", "\r": r"\r", "/": r"\/"}
    return re.sub(r"(\\[^\n\r])|\\?([/\n\r])", lambda found: found[1] or lines[found[2]], pattern)


def _lark(grammar: str, longest_text: int) -> str:
    """Return Lark for llguidance. `longest_text` is the maximum number of forced bytes."""
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
    except ValueError:  # its JSON reader accepts 128 levels
        raise SamplingError(_TOO_DEEP) from None


def _refusal(structure: Structure, error: str) -> str:
    """Return a one-line error that names the unsupported part and its path."""
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
