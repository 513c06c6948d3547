"""`python -m benchmarks readers`: what telling an answer's parts apart costs, for each token and in each form of calls. Needs no model."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import click

from mlxinfer.output_format import OutputFormat
from mlxinfer.output_format.format import ReasoningFormat
from mlxinfer.output_format.history import write_calls
from mlxinfer.output_format.reader import OutputReader
from mlxinfer.output_format.table import FAMILIES
from mlxinfer.tools import Tools, offered

from .files import place
from .options import RESULTS

FORMS = ("hermes", "llama3", "mistral", "deepseek-v3.1", "qwen3-coder", "glm", "gemma4", "pythonic")
PIECE = 4
"""Characters of a piece, about those of a token."""
_WORDS = 'The file is read line by line: "quotes", <tags> & {braces} stand in it, as they do in code.\n'
_THINKING = ReasoningFormat("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class Cost:
    """Reading one kind of text."""

    work: str
    """The form of calls, and what is read."""
    typical_us: float
    """Microseconds of processor time for each piece: the median of the rounds."""
    highest_us: float
    """That of the slowest round."""


def tools() -> Tools:
    """Two tools with texts, numbers and lists."""
    properties = {"path": {"type": "string"}, "text": {"type": "string"}, "line": {"type": "integer"}, "tags": {"type": "array"}}
    parameters = {"type": "object", "properties": properties, "required": ["path"]}
    return offered([{"name": name, "parameters": parameters} for name in ("write_file", "search")])


def texts(form: str, size: int) -> dict[str, str]:
    """An answer of each kind, of about `size` characters."""
    words = _WORDS * (size // len(_WORDS) + 1)
    call = ("write_file", {"path": "a/b.py", "text": words.replace('"', "'"), "line": 12, "tags": ["x", "y"]})
    found = {"free text": words, "a call": write_calls(FAMILIES[form].calls, [call])}
    return {"reasoning": f"<think>{words}</think>", **found} if form == FORMS[0] else found


def measure(form: str, rounds: int, size: int = 8000) -> list[Cost]:
    """Each kind of text in pieces, `rounds` times over."""
    reads, known, found = OutputFormat(_THINKING, FAMILIES[form].calls, "option"), tools(), []
    for kind, text in texts(form, size).items():
        pieces = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
        spent = []
        for _ in range(rounds):
            reader = OutputReader(reads, known)
            begin = time.process_time()
            for piece in pieces:
                reader.add(piece)
            reader.finish()
            spent.append(1e6 * (time.process_time() - begin) / len(pieces))
        found.append(Cost(f"{form}, {kind}", statistics.median(spent), max(spent)))
    return found


def table(found: list[Cost]) -> str:
    """A line for each."""
    lines = ["| what is read | µs of the processor a token | slowest round |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {cost.work} | {cost.typical_us:.1f} | {cost.highest_us:.1f} |" for cost in found)]) + "\n"


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=40, show_default=True)
def readers(rounds: int) -> None:
    """What reading reasoning and calls costs. Writes results/readers.md."""
    text = f"Tokens of {PIECE} characters, one at a time; {rounds} rounds.\n\n"
    text += table([cost for form in FORMS for cost in measure(form, rounds)])
    place(RESULTS / "readers", "md").write_text(text, encoding="utf-8")
    click.echo(text)
