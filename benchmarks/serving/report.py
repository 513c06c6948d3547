"""The results as a table in Markdown, and what they say about the goal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..batch.works import LLAMA_SERVER, MLX_SERVER, OURS
from ..report import caption, number, versions, warnings
from ..samples import Results, Spread
from .works import ENGINE, EVERYBODY, SHORT, step_name

__all__ = ["caption", "document", "overhead"]

_GOAL = 0.03


def document(models: list[Results], about: dict[str, Any]) -> str:
    parts = [f"{caption(about)}\n\n{versions(about)}"]
    for results in models:
        described = about["models"][results.model]
        others = [f"{name} {found['version']}" for name, found in described["engines"].items() if name in (LLAMA_SERVER, MLX_SERVER)]
        beside = f"Beside {', '.join(others)}." if others else "Nobody beside it."
        said = [*goals(results), *(line for line in warnings(described, results) if line)]
        lines = "\n".join(f"- {line}" for line in said)
        parts.append(f"## {results.model} ({described['file']})\n\n{beside}\n\n{table(results)}\n\n{lines}")
    return "\n\n".join(parts) + "\n"


def table(results: Results) -> str:
    engines = [engine for engine in EVERYBODY if engine in results.engines]
    rows = [["", *engines], ["---"] + ["---:"] * len(engines)]
    for work in results.works:
        rows.append([work, *(_cell(results, work, engine) for engine in engines)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(results: Results, work: str, engine: str) -> str:
    found = results.spread(work, engine)
    if found is None:
        return "–"
    scale, unit = (1.0, "/s") if work == SHORT else (1000.0, " ms")
    return f"{number(found.middle * scale)}{unit} ({number(found.low * scale)}–{number(found.high * scale)})"


def overhead(results: Results, streams: int) -> Spread | None:
    """Of a step with the server, as a part of the same step without: in pairs of the same round."""
    found = results.part((step_name(streams), OURS), (step_name(streams), ENGINE))
    return found and Spread(found.middle - 1, found.low - 1, found.high - 1)


def goals(results: Results) -> Iterator[str]:
    for streams in range(1, 17):
        found = overhead(results, streams)
        if found:
            best = _best(results, step_name(streams), OURS) / _best(results, step_name(streams), ENGINE) - 1
            reached = "reached" if found.middle <= _GOAL else "not reached"
            spread = f"{found.low:.1%} to {found.high:.1%}; the best rounds of both: {best:+.1%}"
            yield f"The server adds {found.middle:.1%} to a {step_name(streams)} ({spread}; goal: at most {_GOAL:.0%}): {reached}."


def _best(results: Results, work: str, engine: str) -> float:
    return min(sample.value for sample in results.of(work, engine))
