"""The table of results, in Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import quantiles
from typing import Any

from ..batch.workloads import LLAMA_SERVER, MLX_SERVER
from ..common.report import caption, markdown, number, versions, warnings
from ..common.samples import Results
from .workloads import ENGINE, ENGINES, SHORT, bare_name, served_name, step_name


def document(models: list[Results], about: dict[str, Any]) -> str:
    parts = [f"{caption(about)}\n\n{versions(about)}"]
    for results in models:
        described = about["models"][results.model]
        others = [f"{name} {found['version']}" for name, found in described["engines"].items() if name in (LLAMA_SERVER, MLX_SERVER)]
        compared = f"Compared with {', '.join(others)}." if others else "This project alone."
        said = [*overheads(results), *(line for line in warnings(described, results) if line)]
        lines = "\n".join(f"- {line}" for line in said)
        parts.append(f"## {results.model} ({described['file']})\n\n{compared}\n\n{table(results)}\n\n{lines}")
    return "\n\n".join(parts) + "\n"


def table(results: Results) -> str:
    engines = [engine for engine in ENGINES if engine in results.engines]
    return markdown([["", *engines], *([work, *(_cell(results, work, engine) for engine in engines)] for work in results.works)])


def _cell(results: Results, work: str, engine: str) -> str:
    found = results.spread(work, engine)
    if found is None:
        return "–"
    scale, unit = (1.0, "/s") if work == SHORT else (1000.0, " ms")
    return f"{number(found.middle * scale)}{unit} ({number(found.low * scale)}–{number(found.high * scale)})"


def overhead(results: Results, streams: int) -> list[float]:
    """Time that the server adds to a step, as a fraction of the step without a server, for each pair, in ascending order."""
    bare, served = (results.of(name(streams), ENGINE) for name in (bare_name, served_name))
    return sorted(with_it.value / without.value - 1 for without, with_it in zip(bare, served, strict=True))


def overheads(results: Results) -> Iterator[str]:
    """A sentence for each number of streams."""
    for streams in range(1, 17):
        found = overhead(results, streams)
        if len(found) > 1:
            low, middle, high = quantiles(found, n=4)
            spread = f"median of {len(found)} pairs, quartiles {low:.1%} to {high:.1%}"
            yield f"The server adds {middle:.1%} to a {step_name(streams)} ({spread})."
