"""Tables of launches, in Markdown. All figures but the host's time are computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..common.report import markdown
from .chips import CHIPS

BUILT, REPLAYED, MLX_LM = "mlxinfer", "mlxinfer, replayed", "mlx-lm"
"""Programs whose host's time is measured: this project's steps are built in Python, or replayed by MLX."""
PROGRAMS = (BUILT, MLX_LM)
WORKS = ("decode 1", "decode 8", "prefill")
"""Works with expected speeds."""

Counts = Sequence[dict[str, Any]]
"""Stored fields of `Count`."""


_EXPECTED = (
    "Expected tokens per second, **computed**, for stages of 5 and of 1.5 us. A step takes as long as the slower of GPU and host; "
    "the host is this Linux processor. (h): the host decides.\n\n"
)


def document(about: dict[str, Any]) -> str:
    """The whole page: for each model the cost of a step, and the expected speeds."""
    packages = ", ".join(f"{name} {about['packages'][name]}" for name in ("mlx", "mlx-lm") if name in about["packages"])
    parts = [
        "**Computed, not measured on a Mac**: from the graphs that both programs submit, by MLX's sources and a model of Apple's chips. "
        f"Decoding after {about['past']} tokens, a prompt of {about['prompt']}, cache of {about['kv']} bits; "
        f"kernels as on an M4. {packages}; commit {about['commit'] or 'unknown'}. "
        f"The host's time is that of a busy Linux machine ({about['processor']}), where only ratios mean anything."
    ]
    for name, found in about["models"].items():
        parts += [f"## {name}, {about['bits']} bits, {found['layers']} layers", costs(found["counts"])]
        parts.append(_EXPECTED + speeds(found["counts"], about["prompt"]))
    return "\n\n".join(parts) + "\n"


def costs(counts: Counts) -> str:
    """A row per quantity, a column per work and program."""
    rows: list[tuple[str, str, Callable[[dict[str, Any]], str]]] = [
        ("launches per layer", "decode", lambda c: f"{c['layer_launches']:g}"),
        ("of them one after another", "decode", lambda c: f"{c['layer_stages']:g}"),
        ("launches", "", lambda c: f"{c['launches']}"),
        ("of them one after another", "", lambda c: f"{c['stages']}"),
        ("GB read, each launch's once", "", lambda c: f"{c['distinct'] / 1e9:.3g}"),
        ("GB asked for", "", lambda c: f"{c['reads'] / 1e9:.3g}"),
        ("of that weights, GB", "", lambda c: f"{c['matrix'] / 1e9:.3g}"),
        ("MB written", "", lambda c: f"{c['writes'] / 1e6:{'.3g' if c['writes'] < 1e9 else '.0f'}}"),
        ("waits of the host", "", lambda c: f"{c['syncs']:.2f}".rstrip("0").rstrip(".")),
        ("waits of the GPU for the host", "", lambda c: f"{c['drains']:.2f}".rstrip("0").rstrip(".")),
        ("host, ms (mlxinfer decodes by replays)", "", lambda c: f"{c['host_us'] / 1e3:.1f}"),
        ("host, ms, built in Python", "decode", lambda c: f"{c['built_us'] / 1e3:.1f}" if c.get("built_us") else ""),
        ("of that while the GPU waits", "", lambda c: f"{c['exposed_us'] / 1e3:.2f}"),
    ]
    columns = [(work, program) for work in dict.fromkeys(count["work"] for count in counts) for program in PROGRAMS]
    if any("layer_source" in count for count in counts):
        rows.insert(2, ("KB of kernels' sources per layer, hashed", "decode", lambda c: f"{c.get('layer_source', 0) / 1e3:.0f}"))
    lines = [["", *(f"{_title(work)}: {program}" for work, program in columns)]]
    for title, only, cell in rows:
        lines.append([title, *(cell(_of(counts, program, work)) if work.startswith(only) else "" for work, program in columns)])
    return markdown(lines)


def speeds(counts: Counts, prompt: int) -> str:
    """A row per chip."""
    titles = [[f"{_title(work)}: {program}" for program in PROGRAMS] + ["ratio"] for work in WORKS]
    lines = [["chip", "GB/s", *(title for each in titles for title in each)]]
    for chip in CHIPS:
        cells = [chip.name, f"{chip.bandwidth / 1e9:.0f}"]
        for work in WORKS:
            found = [speed(counts, program, work, chip.name, prompt) for program in PROGRAMS]
            marks = [" (h)" * host_decides(counts, program, work, chip.name) for program in PROGRAMS]
            cells += [_range([f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" for value in each]) for each in found]
            cells[-2:] = [cell + mark for cell, mark in zip(cells[-2:], marks, strict=True)]
            cells.append(_range(sorted(f"{ours / theirs:.2f}" for ours, theirs in zip(*found, strict=True))))
        lines.append(cells)
    return markdown(lines)


def host_times(found: Mapping[str, Mapping[str, Mapping[str, float]]], processor: str) -> str:
    """A row per model and number of rows, from the times of `count.host`."""
    lines = [["model", "rows", "built", "replayed", MLX_LM]]
    order = (BUILT, REPLAYED, MLX_LM)
    for model, by_rows in found.items():
        lines += [[model, rows, *(f"{times[program] / 1e3:.2f}" for program in order)] for rows, times in by_rows.items()]
    about = "without a GPU: only the host's work counts. Ratios mean more than times."
    return f"**The host's ms per step**, measured on this machine ({processor}) {about}\n\n{markdown(lines)}"


def _range(values: Sequence[str]) -> str:
    return "–".join(dict.fromkeys(values))


def speed(counts: Counts, program: str, work: str, chip: str, prompt: int) -> list[float]:
    """Computed tokens per second: the least, and the most."""
    tokens = prompt if work == "prefill" else int(work.split()[1])
    found = _of(counts, program, work)
    return sorted(tokens / max(seconds, found["host_us"] / 1e6) for seconds in found["seconds"][chip])


def host_decides(counts: Counts, program: str, work: str, chip: str) -> bool:
    """True if the host takes longer than the GPU at the least cost of a stage."""
    found = _of(counts, program, work)
    return bool(found["host_us"] / 1e6 > min(found["seconds"][chip]))


def _of(counts: Counts, program: str, work: str) -> dict[str, Any]:
    return next(count for count in counts if (count["program"], count["work"]) == (program, work))


def _title(work: str) -> str:
    return "prompt" if work == "prefill" else f"{work.split()[1]} row{'s' * (not work.endswith(' 1'))}"
