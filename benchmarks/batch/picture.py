"""Six panels: streams together, a stream during a prompt, a reused prefix, the turns of a conversation, drafts."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..picture import COLOURS
from ..samples import Results
from .report import streams_found, turns_found
from .workloads import (
    ALONE,
    BESIDE,
    COLD,
    DISK,
    EDIT,
    FREE,
    LLAMA,
    LLAMA_SERVER,
    MLX_LM,
    MLX_SERVER,
    OURS,
    SERVERS,
    UNDRAFTED,
    WARM,
    streams_name,
    turn_name,
)

_COLOUR = COLOURS | {UNDRAFTED: COLOURS[OURS], LLAMA_SERVER: COLOURS[LLAMA], MLX_SERVER: COLOURS[MLX_LM]}


def draw(results: Results, path: Path, caption: str) -> None:
    figure = Figure(figsize=(11, 6.4), layout="constrained", facecolor="white")
    panels = figure.subplots(2, 3)
    _streams(panels[0, 0], results)
    _beside(panels[0, 1], results)
    _prefix(panels[0, 2], results)
    _read(panels[1, 0], results)
    _first(panels[1, 1], results)
    _drafts(panels[1, 2], results)
    for axes in panels.flat:
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(f"{results.model}. {caption}", fontsize=7.5, color="0.35", x=0.01, ha="left")
    figure.savefig(path, dpi=200)


def _title(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=9, loc="left", fontweight="bold")


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)


def _line(axes: Axes, results: Results, engine: str, points: list[tuple[int, str]], scale: float = 1.0) -> None:
    found = [(x, spread) for x, work in points if (spread := results.spread(work, engine))]
    if not found:
        return
    middles = [spread.middle * scale for _, spread in found]
    errors = [[(s.middle - s.low) * scale for _, s in found], [(s.high - s.middle) * scale for _, s in found]]
    label = OURS if engine == UNDRAFTED else engine
    axes.errorbar([x for x, _ in found], middles, yerr=errors, marker="o", markersize=3, linewidth=1.2, elinewidth=0.7,
                  color=_COLOUR[engine], label=label, zorder=3 if label == OURS else 2)  # fmt: skip


def _streams(axes: Axes, results: Results) -> None:
    _title(axes, "tokens/s of all streams together")
    counts = [int(work.split()[0]) for work in streams_found(results)]
    for engine in (UNDRAFTED, LLAMA, MLX_LM):
        _line(axes, results, engine, [(n, streams_name(n)) for n in counts])
    axes.set_xticks(counts)
    axes.set_ylim(0, None)
    axes.set_xlabel("streams", fontsize=8)
    _legend(axes)


def _bars(axes: Axes, results: Results, groups: list[tuple[str, str, str]], engines: tuple[str, ...], of: str = "") -> None:
    """(label, work, base work) for each group, drawn as a fraction of the base; `of` is the base's engine, if it differs."""
    for place, engine in enumerate(engines):
        for group, (_, work, base) in enumerate(groups):
            part = results.part((work, engine), (base, of or engine))
            if part:
                x = group + (place - (len(engines) - 1) / 2) * 0.26
                axes.bar(x, part.middle, 0.24, color=_COLOUR[engine], label=engine if not group else None)
                shortened = results.shortened(work, engine)
                value = f"{part.middle:.2f}" if of else f"{part.middle:.1%}" if part.middle < 0.1 else f"{part.middle:.0%}"
                text = value if shortened is None else f"{value}\nat {shortened}"
                axes.annotate(text, (x, part.middle), (0, 2),
                              textcoords="offset points", ha="center", fontsize=7.5)  # fmt: skip
    axes.set_xticks(range(len(groups)), [label for label, _, _ in groups])


def _beside(axes: Axes, results: Results) -> None:
    _title(axes, "a stream's speed while a long prompt is read")
    _bars(axes, results, [("part of its speed alone", BESIDE, ALONE)], SERVERS)
    axes.axhline(0.7, color="0.4", linewidth=0.8, linestyle=":")
    axes.set_ylim(0, 1.05)


def _prefix(axes: Axes, results: Results) -> None:
    _title(axes, "first token behind a long prefix, part of cold")
    _bars(axes, results, [("warm", WARM, COLD), ("from disk", DISK, COLD)], SERVERS)
    for x, goal in ((0, 0.05), (1, 0.15)):
        axes.hlines(goal, x - 0.45, x + 0.45, color="0.4", linewidth=0.8, linestyle=":")


def _read(axes: Axes, results: Results) -> None:
    _title(axes, "conversation: tokens read in a turn")
    turns = turns_found(results)
    _line(axes, results, OURS, [(turn, turn_name(turn, "read")) for turn in turns])
    new = [(turn, spread.middle) for turn in turns if (spread := results.spread(turn_name(turn, "new"), OURS))]
    axes.plot([x for x, _ in new], [y for _, y in new], color="0.3", linewidth=0.8, linestyle=":", label="new ones")
    for engine in (LLAMA_SERVER, MLX_SERVER):
        _line(axes, results, engine, [(turn, turn_name(turn, "read")) for turn in turns])
    axes.set_yscale("log")
    axes.set_xlabel("turn", fontsize=8)
    axes.set_xticks(turns_found(results))
    _legend(axes)


def _first(axes: Axes, results: Results) -> None:
    _title(axes, "conversation: ms to the first token")
    for engine in SERVERS:
        _line(axes, results, engine, [(turn, turn_name(turn, "first token")) for turn in turns_found(results)], 1000)
    axes.set_yscale("log")
    axes.set_xlabel("turn", fontsize=8)
    axes.set_xticks(turns_found(results))


def _drafts(axes: Axes, results: Results) -> None:
    _title(axes, "speed with drafts, times that without")
    works = [f"{kind}, {streams_name(n)}" for kind in (EDIT, FREE) for n in (1, 4)]
    _bars(axes, results, [(work.replace(", ", ",\n").replace("repeats ", "repeats\n"), work, work) for work in works], (OURS,), UNDRAFTED)
    axes.axhline(1, color="0.4", linewidth=0.8)
    axes.tick_params(axis="x", labelsize=7)
