"""The jinja2 environment that chat templates run in: what they may reach, and where their work is counted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner
from jinja2.visitor import NodeTransformer

from ..errors import TemplateError
from .template_builtins import DROPPED_FILTERS, FILTERS, FUNCTIONS, GUARDED_METHODS, ChatNamespace, GuardedMethod, output
from .template_limits import Budget, check_operands, seen, spend, weighed

_MAX_SOURCE = 1_000_000

_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        {
            *("capitalize", "casefold", "lower", "swapcase", "title", "upper", "lstrip", "rstrip", "strip", "removeprefix", "removesuffix"),
            *(
                "count",
                "endswith",
                "find",
                "index",
                "rfind",
                "rindex",
                "startswith",
                "partition",
                "rpartition",
                "rsplit",
                "split",
                "splitlines",
            ),
            *(
                "isalnum",
                "isalpha",
                "isascii",
                "isdecimal",
                "isdigit",
                "islower",
                "isnumeric",
                "isprintable",
                "isspace",
                "istitle",
                "isupper",
            ),
        }
    ),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    int: frozenset({"bit_length", "is_integer"}),
    float: frozenset({"is_integer"}),
}


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Whitespace rules and extensions are those of transformers. Templates may only run inside a `template_limits.Budget`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        extensions = [_GenerationTag, LoopControlExtension]
        # without the optimizer, which would work out constants before anything is counted
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=extensions, finalize=output)
        self.globals = dict(FUNCTIONS)
        filters: dict[str, Callable[..., Any]] = {**self.filters, **FILTERS}
        self.filters = {name: _counted(function) for name, function in filters.items() if name not in DROPPED_FILTERS}
        tests: dict[str, Any] = {**self.tests}
        self.tests = {name: _counted(function) for name, function in tests.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > _MAX_SOURCE:
            raise TemplateError(f"the chat template is longer than {_MAX_SOURCE} characters")
        template: nodes.Template = _Instrument().visit(super()._parse(source, name, filename))
        return template

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operands(operator, left, right)
        return weighed(super().call_binop(context, operator, left, right))

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError(f"it reaches for {attribute!r} of a {type(obj).__name__}")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if type(value) is BuiltinMethodType and value.__name__ in GUARDED_METHODS and isinstance(value.__self__, str):
            return GuardedMethod(self, value.__name__, value.__self__)
        return None

    def is_safe_callable(self, obj: Any) -> bool:
        kind = type(obj)
        if kind is BuiltinMethodType:
            return any(isinstance(obj.__self__, owner) and obj.__name__ in names for owner, names in _METHODS.items())
        if kind is MethodType:
            return isinstance(obj.__self__, (LoopContext, Cycler))
        if issubclass(kind, (Macro, LoopContext, Joiner, BlockReference, GuardedMethod)):
            return True
        return any(obj is function for function in FUNCTIONS.values())

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        spend()
        if not isinstance(__obj, Undefined) and not __self.is_safe_callable(__obj):
            name = None if isinstance(__obj, ChatNamespace) else getattr(__obj, "__name__", None)
            raise SecurityError(f"it calls {name or type(__obj).__name__!r}")
        return weighed(__context.call(__obj, *args, **kwargs))


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test that pays for what it is given and for its result."""

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        for arg in args:
            seen(arg)
        return weighed(function(*args, **kwargs))

    return counted


class _GenerationTag(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here it only opens a scope."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Instrument(NodeTransformer):
    """Wraps, in the parsed template, what loops and what makes values or text, so that each is counted."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filtered("_each", node.iter)
        return node

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        return _filtered("_weighed", self.generic_visit(node))

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        return _filtered("_weighed", self.generic_visit(node))

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered("_weighed", node) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered("_weighed", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered("_concat", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = _filtered("_seen", node.expr)
        for operand in node.ops:
            operand.expr = _filtered("_seen", operand.expr)
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Expr:
        return nodes.Const(node.data, lineno=node.lineno)


def _filtered(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


Renderer = Callable[[Mapping[str, Any]], str]


def compile_template(source: str) -> Renderer:
    """A function from variables to text; both raise `TemplateError`."""
    with _template_errors():
        template = ChatEnvironment().from_string(source)

    def render(variables: Mapping[str, Any]) -> str:
        with _template_errors(), Budget(variables):
            return "".join(template.generate(variables))

    return render


@contextmanager
def _template_errors() -> Iterator[None]:
    """A template can raise anything that Python can."""
    try:
        yield
    except TemplateError:
        raise
    except TemplateSyntaxError as error:
        raise TemplateError(f"the chat template cannot be read: line {error.lineno}: {_one_line(error.message)}") from error
    except SecurityError as error:
        raise TemplateError(f"the chat template does what it must not: {_one_line(error)}") from error
    except RecursionError as error:
        raise TemplateError("the chat template nests or recurses too deeply") from error
    except Exception as error:
        raise TemplateError(f"the chat template fails: {_one_line(error) or type(error).__name__}") from error


def _one_line(message: object) -> str:
    return " ".join(str(message).split())[:300]
