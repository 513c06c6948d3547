"""A chat template compiled to a function, with its failures as `TemplateError`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jinja2.exceptions import SecurityError, TemplateSyntaxError

from ..errors import TemplateError
from .template_limits import Budget
from .template_sandbox import ChatEnvironment

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
