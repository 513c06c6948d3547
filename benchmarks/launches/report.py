"""The ledger as tables in Markdown. Everything in it is computed, but the host's time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .chips import CHIPS

PROGRAMS = ("mlxinfer", "mlx-lm")
WORKS = ("decode 1", "decode 8", "prefill")
"""Those that become expected speeds."""

Counts = Sequence[dict[str, Any]]
"""Fields of `Count`, as they are stored."""


def document(about: dict[str, Any]) -> str:
    """The complete page: for each model what a step costs, and the speeds that follow."""
    parts = [_caption(about)]
    for name, found in about["models"].items():
        counts = found["counts"]
        parts.append(f"## {name}, {about['bits']} bits, {found['layers']} layers")
        parts.append(costs(counts, found["layers"]))
        parts.append("Expected tokens per second, **computed**:\n\n" + speeds(counts, about["prompt"]))
    return "\n\n".join(parts) + "\n"


def _caption(about: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {about['packages'][name]}" for name in ("mlx", "mlx-lm") if name in about["packages"])
    return (
        f"**Computed, not measured on a Mac**: from the graphs that both programs submit, by MLX's sources and a model of Apple's chips. "
        f"Decoding after {about['past']} tokens, a prompt of {about['prompt']}, cache of {about['kv']} bits; "
        f"kernels as on an M4. {packages}; commit {about['commit'] or 'unknown'}. "
        f"The host's time is that of a busy Linux machine ({about['processor']}), where only ratios mean anything."
    )


def costs(counts: Counts, layers: int) -> str:
    """A row per quantity and work, a column per program."""
    rows: list[tuple[str, str, Callable[[dict[str, Any]], str]]] = [
        ("launches per layer", "decode", lambda c: f"{c['layer_launches']:g}"),
        ("of them one after another", "decode", lambda c: f"{c['layer_stages']:g}"),
        ("launches", "", lambda c: f"{c['launches']}"),
        ("of them one after another", "", lambda c: f"{c['stages']}"),
        ("GB read, each launch's once", "", lambda c: _gb(c["distinct"])),
        ("GB asked for", "", lambda c: _gb(c["reads"])),
        ("of that weights, GB", "", lambda c: _gb(c["matrix"])),
        ("MB written", "", lambda c: _mb(c["writes"])),
        ("waits of the host", "", lambda c: f"{c['syncs']:.2f}".rstrip("0").rstrip(".")),
        ("waits of the GPU for the host", "", lambda c: f"{c['drains']:.2f}".rstrip("0").rstrip(".")),
        ("host, ms", "", lambda c: f"{c['host_us'] / 1e3:.1f}"),
        ("of that while the GPU waits", "", lambda c: f"{c['exposed_us'] / 1e3:.2f}"),
    ]
    works = list(dict.fromkeys(count["work"] for count in counts))
    head = ["", *(f"{_title(work)}: {program}" for work in works for program in PROGRAMS)]
    lines = [f"| {' | '.join(head)} |", "| --- |" + " ---: |" * (len(head) - 1)]
    for title, only, cell in rows:
        cells = [cell(_of(counts, program, work)) if work.startswith(only) else "" for work in works for program in PROGRAMS]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def speeds(counts: Counts, prompt: int) -> str:
    """A row per chip."""
    head = ["chip", "GB/s"]
    for work in WORKS:
        head += [f"{_title(work)}: {program}" for program in PROGRAMS] + ["ratio"]
    lines = [f"| {' | '.join(head)} |", "| --- |" + " ---: |" * (len(head) - 1)]
    for chip in CHIPS:
        cells = [chip.name, f"{chip.bandwidth / 1e9:.0f}"]
        for work in WORKS:
            ours, theirs = (speed(counts, program, work, chip.name, prompt) for program in PROGRAMS)
            cells += [_number(ours), _number(theirs), f"{ours / theirs:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def speed(counts: Counts, program: str, work: str, chip: str, prompt: int) -> float:
    """Computed tokens a second."""
    tokens = prompt if work == "prefill" else int(work.split()[1])
    return tokens / float(_of(counts, program, work)["seconds"][chip])


def _of(counts: Counts, program: str, work: str) -> dict[str, Any]:
    return next(count for count in counts if (count["program"], count["work"]) == (program, work))


def _title(work: str) -> str:
    return "prompt" if work == "prefill" else f"{work.split()[1]} row{'s' * (not work.endswith(' 1'))}"


def _mb(count: float) -> str:
    return f"{count / 1e6:.3g}" if count < 1e9 else f"{count / 1e6:.0f}"


def _gb(count: float) -> str:
    return f"{count / 1e9:.3g}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}"
