"""Tables of results, in Markdown."""

from __future__ import annotations

from typing import Any

from ..compare.workloads import OURS
from .samples import BYTES, MACHINE, SECONDS, Results, Spread

MOST_IDLE_S = 1.0
MOST_OTHERS = 0.05
TOGETHER, ALONE = "decode at 0, 8 together", "decode at 0"


def document(models: list[Results], about: dict[str, Any]) -> str:
    """The whole page: the machine, and for each model its table and notes."""
    parts = [f"{caption(about)}\n\n{versions(about)}"]
    for results in models:
        described = about["models"][results.model]
        said = [*notes(results), *warnings(described, results)]
        parts.append(f"## {results.model} ({described['file']})\n\n{table(results)}\n\n" + "\n".join(f"- {line}" for line in said))
    return "\n\n".join(parts) + "\n"


def caption(about: dict[str, Any]) -> str:
    count = about["threads"]
    return f"{about['processor']}, {count} thread{'s' * (count > 1)}, {about['system']}, {about['date']}."


def versions(about: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {found}" for name, found in about["packages"].items())
    return f"Python {about['python']}, {packages}; commit {about['commit'] or 'unknown'}."


def table(results: Results) -> str:
    """A row per work, a column per engine, and the ratio to each other engine."""
    engines, others = results.engines, [engine for engine in results.engines if engine != OURS] if OURS in results.engines else []
    head = ["", *engines, *(f"{OURS} / {other}" for other in others), "of the machine"]
    rows = [head]
    for work in results.works:
        ratios = [ratio(results.better((work, OURS), (work, other))) for other in others]
        share = results.share(work, OURS)
        rows.append([work, *(cell(results, work, engine) for engine in engines), *ratios, f"{share.middle:.0%}" if share else ""])
    return markdown(rows)


def markdown(rows: list[list[str]]) -> str:
    """A table whose first row is the head; "" without other rows."""
    if len(rows) == 1:
        return ""
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], ["---"] + ["---:"] * (len(rows[0]) - 1), *rows[1:]])


def notes(results: Results) -> list[str]:
    """Lines below the table."""
    lines = []
    together = results.better((TOGETHER, OURS), (ALONE, OURS))
    if together:
        lines.append(f"{OURS}: 8 sequences together get {ratio(together)} times the tokens of one.")
    rates = {work: results.spread(work, MACHINE) for work in ("read", "copy", "multiply-add")}
    shown = [f"{work} {rate.middle / 1e9:.1f}" for work, rate in rates.items() if rate]
    if shown:
        lines.append(f"This machine, in 10⁹ bytes or operations a second: {', '.join(shown)}.")
    if any(results.shortened(work, engine) is not None for work in results.works for engine in results.engines):
        lines.append("“at” and a number: this engine got so many tokens only, because more would take it minutes.")
    return lines


def warnings(described: dict[str, Any], results: Results) -> list[str]:
    lines = [f"{engine} is left out: {reason}" for engine, reason in described["left_out"].items()]
    texts = {engine: about["first_token"] for engine, about in described["engines"].items() if "first_token" in about}
    if len(set(texts.values())) > 1:
        lines.append("The engines do not agree on the first token: " + ", ".join(f"{engine} {text!r}" for engine, text in texts.items()))
    shares = [sample.others for sample in results.samples]
    disturbed = sum(share > MOST_OTHERS for share in shares)
    if disturbed:
        lines.append(
            f"Not a quiet machine: in {disturbed} of {len(shares)} measurements others had more than {MOST_OTHERS:.0%} of its processors "
            f"(at most {max(shares):.0%}). Engines whose threads spin while they wait lose most by that."
        )
    for engine in results.engines:
        idle = sum(sample.idle_cpu_s for work in results.works for sample in results.of(work, engine))
        if idle > MOST_IDLE_S:
            lines.append(f"{engine} used {idle:.1f} s of processor time while others were measured.")
    return lines


def cell(results: Results, work: str, engine: str, *, spread: bool = True) -> str:
    """A value with its unit and spread, and its length if other engines have a longer one."""
    samples = results.of(work, engine)
    if not samples:
        return "–"
    scale, unit = {SECONDS: (1.0, " s"), BYTES: (1e-6, " MB")}.get(samples[0].unit, (1.0, "" if spread else " tok/s"))
    found = Spread.of(sample.value * scale for sample in samples)
    shortened = results.shortened(work, engine)
    around = f" ({number(found.low)}–{number(found.high)})" if spread else ""
    return f"{number(found.middle)}{unit}{around}" + (f" at {shortened}" if shortened is not None else "")


def ratio(spread: Spread | None) -> str:
    return f"{spread.middle:.2f} ({spread.low:.2f}–{spread.high:.2f})" if spread else "–"


def number(value: float) -> str:
    """At least three digits."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
