"""A picture of six panels: streams together, a stream during a prompt, a reused prefix, the turns of a conversation, drafts."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..common.picture import COLOURS, finish
from ..common.samples import Results
from . import workloads as works
from .report import streams_found, turns_found

_COLOUR = COLOURS | {works.UNDRAFTED: COLOURS["mlxinfer"], works.LLAMA_SERVER: COLOURS["llama.cpp"], works.MLX_SERVER: COLOURS["mlx-lm"]}


def draw(results: Results, path: Path, caption: str) -> None:
    figure = Figure(figsize=(11, 6.4), layout="constrained", facecolor="white")
    (streams, beside, prefix), (read, first, drafts) = figure.subplots(2, 3)
    counts, turns = [int(work.split()[0]) for work in streams_found(results)], turns_found(results)
    for engine in (works.UNDRAFTED, works.LLAMA, works.MLX_LM):
        _line(streams, results, engine, [(n, works.streams_name(n)) for n in counts])
    streams.set_ylim(0, None)
    _bars(beside, results, [("part of its speed alone", works.BESIDE, works.ALONE)], works.SERVERS)
    beside.axhline(0.7, color="0.4", linewidth=0.8, linestyle=":")
    beside.set_ylim(0, 1.05)
    _bars(prefix, results, [("warm", works.WARM, works.COLD), ("from disk", works.DISK, works.COLD)], works.SERVERS)
    for x, goal in ((0, 0.05), (1, 0.15)):
        prefix.hlines(goal, x - 0.45, x + 0.45, color="0.4", linewidth=0.8, linestyle=":")
    for engine in works.SERVERS:
        _line(read, results, engine, [(turn, works.turn_name(turn, "read")) for turn in turns])
        _line(first, results, engine, [(turn, works.turn_name(turn, "first token")) for turn in turns], 1000)
    new = [(turn, spread.middle) for turn in turns if (spread := results.spread(works.turn_name(turn, "new"), works.OURS))]
    read.plot([x for x, _ in new], [y for _, y in new], color="0.3", linewidth=0.8, linestyle=":", label="new ones")
    names = [f"{kind}, {works.streams_name(n)}" for kind in (works.EDIT, works.FREE) for n in (1, 4)]
    labels = [name.replace(", ", ",\n").replace("repeats ", "repeats\n") for name in names]
    _bars(drafts, results, list(zip(labels, names, names, strict=True)), (works.OURS,), works.UNDRAFTED)
    drafts.axhline(1, color="0.4", linewidth=0.8)
    _finish(streams, "tokens/s of all streams together", "streams", counts)
    _finish(beside, "a stream's speed while a long prompt is read")
    _finish(prefix, "first token after a long prefix, part of cold")
    for axes, title in ((read, "conversation: tokens read in a turn"), (first, "conversation: ms to the first token")):
        axes.set_yscale("log")
        _finish(axes, title, "turn", turns)
    _finish(drafts, "speed with drafts, times that without")
    drafts.tick_params(axis="x", labelsize=7)
    for axes in (streams, read):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8)
    finish(figure, path, f"{results.model}. {caption}")


def _finish(axes: Axes, title: str, label: str = "", ticks: list[int] | None = None) -> None:
    axes.set_title(title, fontsize=9, loc="left", fontweight="bold")
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    if ticks is not None:
        axes.set_xticks(ticks)
        axes.set_xlabel(label, fontsize=8)


def _line(axes: Axes, results: Results, engine: str, points: list[tuple[int, str]], scale: float = 1.0) -> None:
    found = [(x, spread) for x, work in points if (spread := results.spread(work, engine))]
    if not found:
        return
    middles = [spread.middle * scale for _, spread in found]
    errors = [[(s.middle - s.low) * scale for _, s in found], [(s.high - s.middle) * scale for _, s in found]]
    label = works.OURS if engine == works.UNDRAFTED else engine
    axes.errorbar([x for x, _ in found], middles, yerr=errors, marker="o", markersize=3, linewidth=1.2, elinewidth=0.7,
                  color=_COLOUR[engine], label=label, zorder=3 if label == works.OURS else 2)  # fmt: skip


def _bars(axes: Axes, results: Results, groups: list[tuple[str, str, str]], engines: tuple[str, ...], of: str = "") -> None:
    """Draw fractions of a base: (label, work, base work) for each group. `of` is the engine of the base, if it differs."""
    for place, engine in enumerate(engines):
        for group, (_, work, base) in enumerate(groups):
            part = results.part((work, engine), (base, of or engine))
            if part:
                x = group + (place - (len(engines) - 1) / 2) * 0.26
                axes.bar(x, part.middle, 0.24, color=_COLOUR[engine])
                shortened = results.shortened(work, engine)
                value = f"{part.middle:.2f}" if of else f"{part.middle:.1%}" if part.middle < 0.1 else f"{part.middle:.0%}"
                text = value if shortened is None else f"{value}\nat {shortened}"
                axes.annotate(text, (x, part.middle), (0, 2), textcoords="offset points", ha="center", fontsize=7.5)
    axes.set_xticks(range(len(groups)), [label for label, _, _ in groups])
