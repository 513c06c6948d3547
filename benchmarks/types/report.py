"""One row per model: its speeds, how much better they are, and how much of the machine they use."""

from __future__ import annotations

from ..report import cell, ratio
from ..samples import Results
from ..workloads import OURS

PREFILL = "prefill 512"
_OTHER = "llama.cpp"


def table(models: list[Results], decode: str) -> str:
    columns = [f"{kind}: {what}" for kind in ("decode", PREFILL) for what in (OURS, _OTHER, "ratio", "of the machine")]
    lines = [f"| width, type | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}"]
    for results in models:
        cells = [text for work in (decode, PREFILL) for text in _cells(results, work)]
        lines.append(f"| {results.model} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(results: Results, work: str) -> list[str]:
    share = results.share(work, OURS)
    speeds = [cell(results, work, engine, spread=False).removesuffix(" tok/s") for engine in (OURS, _OTHER)]
    return [*speeds, ratio(results.better((work, OURS), (work, _OTHER))), f"{share.middle:.0%}" if share else "–"]
