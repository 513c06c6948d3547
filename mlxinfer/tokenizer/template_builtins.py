"""The functions, filters and methods of text that chat templates get in place of jinja2's own.

Each checks the size of what it is about to make. `tojson`, `raise_exception` and `strftime_now` are as transformers defines them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from string import Formatter
from typing import Any

from jinja2 import pass_context, pass_environment
from jinja2.environment import Environment
from jinja2.exceptions import TemplateRuntimeError
from jinja2.filters import do_batch, do_round, make_attrgetter, sync_do_slice
from jinja2.runtime import Context
from jinja2.sandbox import SandboxedFormatter
from jinja2.utils import Cycler, Joiner, Namespace

from ..errors import TemplateError
from .template_limits import MAX_SIZE, allow, check_count, check_format, spend


class Each:
    """A loop's iterable: every turn is a step."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = values

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            spend()
            yield value

    def __len__(self) -> int:
        return len(self._values)  # type: ignore[arg-type]  # a TypeError tells jinja2 to count for itself


class ChatNamespace(Namespace):
    """Prints nothing of what it holds: namespaces can hold each other."""

    def __repr__(self) -> str:
        return "<namespace>"


class GuardedMethod:
    """A method of a text whose result may be larger than the text."""

    def __init__(self, environment: Environment, method: str, text: str) -> None:
        self._environment, self._method, self._text = environment, method, text

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        return GUARDED_METHODS[self._method](self._environment, self._text, *args, **kwargs)


@pass_context
def output(context: Context, value: Any) -> str:
    """Everything that a template writes goes through here."""
    text = str(value)
    spend(len(text))
    return text


def _join(separator: str, values: Iterable[Any]) -> str:
    texts = [str(value) for value in values]
    allow(sum(map(len, texts)) + len(separator) * len(texts))
    return separator.join(texts)


def _replace(text: str, old: str, new: str, count: int = -1) -> str:
    times = text.count(old) if old else len(text) + 1
    allow(len(text) + (times if count < 0 else min(times, count)) * len(new))
    return text.replace(old, new, count)


def _padded(method: str) -> Callable[..., str]:
    def pad(environment: Environment, text: str, width: int, *fill: str) -> str:
        allow(max(width, len(text)))
        result: str = getattr(str, method)(text, width, *fill)
        return result

    return pad


class _Formatter(SandboxedFormatter):
    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._size = 0

    def format_field(self, value: Any, format_spec: str) -> Any:
        check_format(format_spec)
        text = Formatter.format_field(self, value, format_spec)
        self._size += len(text)
        allow(self._size)
        return text


def _format(environment: Environment, text: str, *args: Any, **kwargs: Any) -> str:
    return _Formatter(environment).vformat(text, args, kwargs)


GUARDED_METHODS: dict[str, Callable[..., str]] = {
    "format": _format,
    "join": lambda environment, text, values: _join(text, values),
    "replace": lambda environment, text, old, new, count=-1: _replace(text, old, new, count),
    **{method: _padded(method) for method in ("center", "ljust", "rjust", "zfill")},
}


@pass_environment
def _join_filter(environment: Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    return _join(str(d), value if attribute is None else map(make_attrgetter(environment, attribute), value))


def _replace_filter(s: Any, old: Any, new: Any, count: int | None = None) -> str:
    return _replace(str(s), str(old), str(new), -1 if count is None else count)


def _center_filter(value: Any, width: int = 80) -> str:
    allow(width)
    return str(value).center(width)


def _indent_filter(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    check_count(width)
    margin = width if isinstance(width, str) else " " * width
    text = str(s)
    lines = (text + "\n").splitlines()
    allow(len(text) + len(margin) * len(lines))
    return "\n".join(margin + line if (first if place == 0 else line or blank) else line for place, line in enumerate(lines))


def _format_filter(value: Any, *args: Any, **kwargs: Any) -> str:
    check_format(str(value), kwargs or args)
    return str(value) % (kwargs or args)


@pass_environment
def _sum_filter(environment: Environment, iterable: Iterable[Any], attribute: str | int | None = None, start: float = 0) -> Any:
    if not isinstance(start, (int, float)):
        raise TemplateRuntimeError("sum only adds numbers")
    return sum(iterable if attribute is None else map(make_attrgetter(environment, attribute), iterable), start)


def _batch_filter(value: Iterable[Any], linecount: int, fill_with: Any = None) -> Any:
    check_count(linecount)
    return do_batch(value, linecount, fill_with)


def _slice_filter(value: Any, slices: int, fill_with: Any = None) -> Any:
    check_count(slices)
    return sync_do_slice(value, slices, fill_with)


def _round_filter(value: float, precision: int = 0, method: Any = "common") -> float:
    check_count(precision, 300)
    return do_round(value, precision, method)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escaping."""
    check_count(indent)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    pieces, size = [], 0
    for piece in encoder.iterencode(value):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_SIZE:
            break
    allow(size)
    return "".join(pieces)


FILTERS: dict[str, Callable[..., Any]] = {
    "batch": _batch_filter,
    "center": _center_filter,
    "format": _format_filter,
    "indent": _indent_filter,
    "join": _join_filter,
    "replace": _replace_filter,
    "round": _round_filter,
    "slice": _slice_filter,
    "sum": _sum_filter,
    "tojson": _to_json,
    "_each": lambda values: Each(values),
    "_weighed": lambda value: value,
    "_seen": lambda value: value,
    "_concat": lambda values: _join("", values),
}
DROPPED_FILTERS = ("pprint", "random", "urlize", "wordwrap", "xmlattr")


def _range(*bounds: int) -> range:
    values = range(*bounds)
    check_count(len(values))
    return values


def _raise_exception(message: Any) -> None:
    raise TemplateError(f"the chat template refuses this conversation: {' '.join(str(message).split())[:300]}")


def _strftime_now(pattern: str) -> str:
    check_format(pattern)
    check_count(len(pattern), 1000)
    return datetime.now().strftime(pattern)


FUNCTIONS: dict[str, Any] = {
    "range": _range,
    "dict": dict,
    "namespace": ChatNamespace,
    "cycler": Cycler,
    "joiner": Joiner,
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
}
