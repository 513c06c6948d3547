"""`python -m benchmarks structured`: what holding an answer to a schema costs, in pairs of a held and a free answer within one process."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

import click

from .files import place
from .options import RESULTS
from .system import describe

if TYPE_CHECKING:
    from mlxinfer import LLM, SamplingParams

STUDY = "structured"
_PROMPT = "Write a list of words: "
_TEXTS = {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 30}
_NAMES = ("destination_city_name", "departure_airport_code", "preferred_travel_date", "number_of_passengers")
_CALL = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 8} for name in _NAMES},
    "required": list(_NAMES),
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Measure:
    """One answer, or several at once."""

    wall_ms: float
    """Milliseconds of decoding a token, of the slowest answer."""
    cpu_ms: float
    """Milliseconds of processor time for each token of an answer, prompts included."""
    tokens: int
    """Tokens of the longest answer."""
    steps: int
    """Steps of the engine that the answers took."""
    accepted: int
    """Tokens of all answers that were drafts which held."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A free answer and one that is held to a schema, one after the other."""

    work: str
    """What was asked for."""
    free: Measure
    """Without a schema."""
    held: Measure
    """With one."""


def measure(llm: LLM, streams: int, params: SamplingParams) -> Measure:
    """`streams` answers at once."""
    steps, begin = llm.stats().steps, time.process_time()
    answers = llm.generate([_PROMPT] * streams, params)
    cpu = time.process_time() - begin
    longest = max(answers, key=lambda answer: len(answer.token_ids))
    wall = max(answer.usage.stats.decode_s / max(len(answer.token_ids) - 1, 1) for answer in answers)
    accepted = sum(answer.usage.stats.accepted_tokens for answer in answers)
    return Measure(1000 * wall, 1000 * cpu / len(longest.token_ids), len(longest.token_ids), llm.stats().steps - steps, accepted)


def pairs(model: str, rounds: int) -> list[Pair]:
    """All pairs, in alternating order, after one of each that does not count."""
    from mlxinfer import LLM, SamplingParams, Schema

    found: list[Pair] = []
    free = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    with LLM(model, speculate=False, prefix_cache=False) as llm:
        held = SamplingParams(temperature=0, max_tokens=64, structure=Schema(_TEXTS))
        for streams in (1, 8):
            found += _alternating(f"texts, {streams} at once", rounds, partial(measure, llm, streams), free, held)
    with LLM(model, prefix_cache=False) as llm:
        held = SamplingParams(temperature=0, max_tokens=120, structure=Schema(_CALL))
        found += _alternating("arguments of a call, with drafts", rounds, partial(measure, llm, 1), free, held)
    return found


def _alternating(
    work: str, rounds: int, run: Callable[[SamplingParams], Measure], free: SamplingParams, held: SamplingParams
) -> list[Pair]:
    run(free), run(held)
    found = []
    for number in range(rounds):
        first = run(held if number % 2 else free)
        second = run(free if number % 2 else held)
        found.append(Pair(work, *((second, first) if number % 2 else (first, second))))
    return found


def table(found: list[Pair]) -> str:
    """Medians of the ratios, held by free."""
    lines = [
        "| work | time of a token | quartiles | processor time of a token | steps for each token | drafts that held |",
        "|---|---|---|---|---|---|",
    ]
    for work in dict.fromkeys(pair.work for pair in found):
        some = [pair for pair in found if pair.work == work]
        wall = sorted(pair.held.wall_ms / pair.free.wall_ms for pair in some)
        cpu = statistics.median(pair.held.cpu_ms / pair.free.cpu_ms for pair in some)
        low, high = wall[len(wall) // 4], wall[-1 - len(wall) // 4]
        last = some[-1].held
        lines.append(
            f"| {work} | {statistics.median(wall):.3f} | {low:.3f} to {high:.3f} | {cpu:.3f} "
            f"| {last.steps / last.tokens:.2f} | {last.accepted} |"
        )
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--model", default="smollm2", show_default=True)
@click.option("--rounds", type=click.IntRange(1, 1000), default=20, show_default=True)
@click.option("--name", default=STUDY, show_default=True, help="Of the files in results/.")
def structured(model: str, rounds: int, name: str) -> None:
    """Answers held to a schema against free ones, in pairs. Writes results/NAME.json and .md."""
    found = pairs(model, rounds)
    about = describe() | {"study": STUDY, "model": model, "rounds": rounds, "pairs": [asdict(pair) for pair in found]}
    RESULTS.mkdir(exist_ok=True)
    place(RESULTS / name, "json").write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    text = "Held to a schema by free, medians of pairs in one process.\n\n" + table(found)
    place(RESULTS / name, "md").write_text(text, encoding="utf-8")
    click.echo(text)
