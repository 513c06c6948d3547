"""The jinja2 sandbox of chat templates. It limits the objects that a template can reach, and its work.

A template is part of a model's files, so it is untrusted. Each loop iteration and call costs a step, and each new value costs its size.
Operations whose result can be much larger than their input are checked beforehand. Nothing is interrupted from outside, so rendering works
in any thread. `tojson`, `raise_exception`, `strftime_now` and the whitespace rules are those of transformers.

jinja2's own sandbox limits neither time nor memory. A deadline that is only checked in loops does not replace weighing containers: after
`[x, x]` or `{'a': x, 'b': x}` is repeated 100 times, one comparison of two such values runs for more than 30 s. Here it is rejected within
0.4 s and 37 MB.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from string import Formatter
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2 import filters, meta, nodes, pass_context, pass_environment
from jinja2.environment import Environment
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

from ..errors import TemplateError, one_line

MAX_SOURCE = 500_000
"""Characters of a template."""
MAX_STEPS = 2_000_000
MAX_SECONDS = 5.0
"""Processor time of the rendering thread: a busy machine does not fail a template."""
MAX_SIZE = 16_000_000
"""Characters of one text. A container weighs as much as its contents, and `_ELEMENT` more for each element."""
MAX_COUNT = 100_000
"""Numbers of a range, lines of a batch, width of a column."""
_ELEMENT = 32
_CHARACTERS_PER_STEP = 256
_MAX_INT_BITS = 16_384
_CONTAINERS: Any = (list, tuple, dict, type({}.keys()), type({}.values()), type({}.items()))


class Budget:
    """Steps and time that are left for one rendering."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._deadline = time.thread_time() + MAX_SECONDS

    def spend(self, characters: int) -> None:
        self._steps -= 1 + characters // _CHARACTERS_PER_STEP
        if self._steps < 0 or time.thread_time() > self._deadline:
            raise TemplateError("the chat template runs too long: it loops over too much")


_current: ContextVar[Budget] = ContextVar("template_budget")


def _spend(size: int = 0) -> None:
    """Charge one step and `size` characters. Raises `TemplateError` if the size or the total is above its limit."""
    if size > MAX_SIZE:
        raise TemplateError("the chat template makes a text or a list that is too large")
    _current.get().spend(size)


def _weigh(value: Any) -> int:
    """Size of a value as text; shared parts count each time. Stops counting above `MAX_SIZE`."""
    size, pending = 0, [value]
    while pending and size <= MAX_SIZE:
        item = pending.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, int):
            size += item.bit_length() // 3
        elif isinstance(item, _CONTAINERS):
            size += _ELEMENT * len(item)
            pending.extend(item)
            pending.extend(item.values() if isinstance(item, dict) else ())
    return size


def _paid(value: Any) -> Any:
    """Charge the size of the value, and return it."""
    _spend(_weigh(value))
    return value


def _turns(values: Iterable[Any]) -> Iterator[Any]:
    """The values of a loop; each iteration costs a step."""
    for value in values:
        _spend()
        yield value


def _check_count(*values: Any) -> None:
    for value in values:
        if isinstance(value, int) and value > MAX_COUNT:
            raise TemplateError(f"the chat template asks for {value} of something, more than {MAX_COUNT}")


def _check_width(pattern: str, wide: str = r"%[^a-zA-Z%]*(?:\*|\d{4,})") -> None:
    if re.search(wide, pattern):
        raise TemplateError("the chat template formats a field that is too wide")


def _joined(values: Iterable[Any], separator: str = "") -> str:
    texts, size = [], 0
    for value in values:
        texts.append(str(value))
        size += len(texts[-1]) + len(separator)
        if size > MAX_SIZE:
            break
    _spend(size)
    return separator.join(texts)


def _replaced(text: str, old: str, new: str, count: int = -1) -> str:
    times = text.count(old) if old else len(text) + 1
    _spend(len(text) + (times if count < 0 else min(times, count)) * len(new))
    return text.replace(old, new, count)


def _printf(pattern: str, values: Any) -> str:
    _check_width(pattern)
    _spend(len(pattern) + _weigh(values) * (pattern.count("%") if isinstance(values, dict) else 1))
    return str(pattern % values)


class _Formatter(SandboxedFormatter):
    """`str.format` that charges every field."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._size = 0

    def format_field(self, value: Any, format_spec: str) -> Any:
        _check_width(format_spec, r"\d{4,}")
        text = Formatter.format_field(self, value, format_spec)
        self._size += len(text)
        _spend(self._size)
        return text


class ChatNamespace(Namespace):
    """A namespace whose text omits its values: namespaces can contain each other."""

    def __repr__(self) -> str:
        return "<namespace>"


def _range(*bounds: int) -> range:
    _check_count(len(range(*bounds)))
    return range(*bounds)


def _raise_exception(message: Any) -> None:
    raise TemplateError(f"the chat template refuses this conversation: {one_line(message, 300)}")


def _strftime_now(pattern: str) -> str:
    _check_width(pattern)
    return datetime.now().strftime(pattern)


_FUNCTIONS: dict[str, Any] = {
    "range": _range,
    "dict": dict,
    "namespace": ChatNamespace,
    "cycler": Cycler,
    "joiner": Joiner,
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
}


@pass_environment
def _join(environment: Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    return _joined(value if attribute is None else map(filters.make_attrgetter(environment, attribute), value), str(d))


@pass_environment
def _sum(environment: Environment, iterable: Iterable[Any], attribute: str | int | None = None, start: float = 0) -> Any:
    return filters.sync_do_sum(environment, iterable, attribute, start + 0)  # `+ 0` rejects lists, which each addition would copy


def _indent(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    margin = len(width) if isinstance(width, str) else width
    _spend(len(str(s)) + margin * (len(str(s).splitlines()) + 1))
    return filters.do_indent(str(s), width, first, blank)


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return _joined(encoder.iterencode(value))


_FILTERS: dict[str, Callable[..., Any]] = {
    "format": lambda value, *args, **kwargs: _printf(str(value), kwargs or args),
    "indent": _indent,
    "join": _join,
    "replace": lambda s, old, new, count=None: _replaced(str(s), str(old), str(new), -1 if count is None else count),
    "sum": _sum,
    "tojson": _to_json,
    "_paid": lambda value: value,
    "_joined": _joined,
    "_turns": _turns,
}
_DROPPED_FILTERS = ("pprint", "random", "urlize", "wordwrap", "xmlattr")
_COUNTING_FILTERS = frozenset({"batch", "center", "indent", "round", "slice", "tojson"})

_TEXT_METHODS = """
capitalize casefold center count endswith find format index isalnum isalpha isascii isdecimal isdigit islower isnumeric isprintable
isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip
split splitlines startswith strip swapcase title upper zfill
"""
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(_TEXT_METHODS.split()),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
}


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment of chat templates. Rendering needs a `Budget` in `_current`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(_joined)  # type: ignore[assignment]  # joins a block that is used as a value

    def __init__(self) -> None:
        extensions = [_GenerationTag, LoopControlExtension]
        # The optimizer would evaluate constants before a budget exists.
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=extensions, finalize=_output)
        self.globals = dict(_FUNCTIONS)
        allowed = {name: function for name, function in {**self.filters, **_FILTERS}.items() if name not in _DROPPED_FILTERS}
        self.filters = {name: _counted(function, name in _COUNTING_FILTERS) for name, function in allowed.items()}
        tests: dict[str, Any] = {**self.tests}
        self.tests = {name: _counted(function) for name, function in tests.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_SOURCE:
            raise TemplateError(f"the chat template is longer than {MAX_SOURCE} characters")
        template: nodes.Template = _Instrument().visit(super()._parse(source, name, filename))
        return template

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            return _printf(left, right)
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_INT_BITS:
                raise TemplateError("the chat template makes a number that is too large")
        elif operator == "*":
            for repeated, times in ((left, right), (right, left)):
                if isinstance(times, int):
                    _spend(_weigh(repeated) * max(times, 0))
        return _paid(super().call_binop(context, operator, left, right))

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError(f"it reaches for {attribute!r} of a {type(obj).__name__}")

    def wrap_str_format(self, value: Any) -> None:
        """Do nothing: `call` handles `str.format`."""

    def is_safe_callable(self, obj: Any) -> bool:
        kind = type(obj)
        if kind is BuiltinMethodType:
            return any(isinstance(obj.__self__, owner) and obj.__name__ in names for owner, names in _METHODS.items())
        if kind is MethodType:
            return isinstance(obj.__self__, (LoopContext, Cycler))
        return issubclass(kind, (Macro, LoopContext, Joiner, BlockReference)) or any(obj is known for known in _FUNCTIONS.values())

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _spend()
        if not isinstance(__obj, Undefined) and not __self.is_safe_callable(__obj):
            raise SecurityError(f"it calls {getattr(__obj, '__name__', None) or type(__obj).__name__!r}")
        if type(__obj) is BuiltinMethodType and isinstance(__obj.__self__, str):
            for internal in ("_block_vars", "_loop_vars"):  # jinja2 passes these to every call in a block or a loop
                kwargs.pop(internal, None)
            return _paid(__self._call_text_method(__obj.__name__, __obj.__self__, args, kwargs))
        return _paid(__context.call(__obj, *args, **kwargs))

    def _call_text_method(self, name: str, text: str, args: Any, kwargs: Any) -> Any:
        if name == "format":
            return _Formatter(self).vformat(text, args, kwargs)
        _check_count(*args)
        if name == "join":
            return _joined(args[0], text)
        return _replaced(text, *args, **kwargs) if name == "replace" else getattr(text, name)(*args, **kwargs)


def _counted(function: Callable[..., Any], by_number: bool = False) -> Callable[..., Any]:
    """Wrap a filter or test: each call costs a step and the size of its result. `by_number`: its arguments decide the result's size."""

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if by_number:
            _check_count(*args[1:], *kwargs.values())
        return _paid(function(*args, **kwargs))

    return counted


@pass_context
def _output(context: Context, value: Any) -> str:
    """Charge a text that the template writes."""
    text = str(value)
    _spend(len(text))
    return text


class _GenerationTag(Extension):
    """`{% generation %}` marks an assistant's text for training; here it only opens a scope."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Instrument(NodeTransformer):
    """Adds filters to nodes that the environment cannot intercept: loops, literal containers and `~`."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filtered("_turns", node.iter)
        return node

    def visit_List(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") == "store" else _filtered("_paid", node)

    visit_Dict = visit_Tuple = visit_List

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered("_joined", nodes.List(node.nodes, lineno=node.lineno))


def _filtered(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


Renderer = Callable[[Mapping[str, Any]], str]


def compile_template(source: str) -> Renderer:
    """Return a function from variables to text. Both raise `TemplateError`."""
    with _template_errors():
        template = ChatEnvironment().from_string(source)

    def render(variables: Mapping[str, Any]) -> str:
        token = _current.set(Budget())
        try:
            with _template_errors():
                return _joined(template.generate(variables))
        finally:
            _current.reset(token)

    return render


def mentioned_variables(source: str) -> frozenset[str]:
    """Names of the variables that a template reads but does not set. Raises `TemplateError`."""
    with _template_errors():
        return frozenset(meta.find_undeclared_variables(ChatEnvironment().parse(source)))


@contextmanager
def _template_errors() -> Iterator[None]:
    """Turn every exception into a `TemplateError`: a template can raise any."""
    try:
        yield
    except TemplateError:
        raise
    except TemplateSyntaxError as error:
        raise TemplateError(f"the chat template cannot be read: line {error.lineno}: {one_line(error.message, 300)}") from error
    except SecurityError as error:
        raise TemplateError(f"the chat template does what it must not: {one_line(error, 300)}") from error
    except RecursionError as error:
        raise TemplateError("the chat template nests or recurses too deeply") from error
    except Exception as error:
        raise TemplateError(f"the chat template fails: {one_line(error, 300)}") from error
