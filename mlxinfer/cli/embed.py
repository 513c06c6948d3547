"""Print embeddings of texts, one JSON object per line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from ..errors import PromptError
from .common.console import as_text, opened
from .common.model_command import ModelCommand
from .common.options import model_argument, model_options

if TYPE_CHECKING:
    from ..engine.llm import LLM

_TOGETHER = 256
"""Number of texts embedded before their lines are printed."""


_EXAMPLES = """\b
Examples:
  mlxinfer embed MODEL "a text" "another one"
  mlxinfer embed MODEL --dimensions 256 < texts.txt > vectors.jsonl"""


@click.command(short_help="Vectors of texts.", cls=ModelCommand, epilog=_EXAMPLES)
@model_argument
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option("--dimensions", type=click.IntRange(min=1), metavar="N", help="Keep the first N numbers of each vector.")
@click.option("--input-type", type=click.Choice(["query", "document"]), help="Put the model's prompt for such texts before each.")
@click.option("--prompt-name", metavar="NAME", help="Put this prompt of the model before each text.")
@click.option("--truncate", is_flag=True, help="Cut texts that are too long.")
@model_options
def embed(
    model: str,
    texts: tuple[str, ...],
    dimensions: int | None,
    input_type: str | None,
    prompt_name: str | None,
    truncate: bool,
    **options: Any,
) -> None:
    """Print a vector for each TEXT, or for each line of standard input."""
    asked = {"input_type": input_type, "prompt_name": prompt_name, "truncate": truncate}
    with opened(model, options) as llm:
        source = iter(texts) if texts else _lines()
        index = 0
        while batch := list(islice(source, _TOGETHER)):
            index = _print(llm, batch, index, dimensions, asked)
        if not index:
            raise PromptError("no text: give some as arguments, or as lines on standard input")


def _print(llm: LLM, texts: list[str], index: int, dimensions: int | None, asked: dict[str, Any]) -> int:
    """Print the vectors and return the next text's index."""
    for row in llm.embed(texts, dimensions, **asked):
        click.echo(json.dumps({"index": index, "embedding": row.tolist()}))
        index += 1
    return index


def _lines() -> Iterator[str]:
    for line in sys.stdin.buffer:
        if text := as_text(line, "standard input").rstrip("\r\n"):
            yield text
