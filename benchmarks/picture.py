"""The results as a picture: each engine relative to one of them; longer is better."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .report import cell
from .samples import Results, Spread

COLOURS = {"mlxinfer": "#2563eb", "mlxinfer-plain": "#93c5fd", "llama.cpp": "#8d99a6", "mlx-lm": "#d9a441"}
_ROOM_FOR_NUMBERS = 1.35
WIDTH_INCHES, ROW_INCHES = 9.0, 0.21


def draw(models: list[Results], reference: str, path: Path, caption: str) -> None:
    """One panel per model, one group of bars per work."""
    bars = max(len(results.works) * (len(results.engines) + 1) for results in models)
    figure = Figure(figsize=(WIDTH_INCHES, 1.0 + ROW_INCHES * bars), layout="constrained", facecolor="white")
    longest = max((ratio.high for results in models for ratio in _ratios(results, reference)), default=1.0)
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    for index, (results, axes) in enumerate(zip(models, panels, strict=True)):
        _panel(axes, results, reference, longest * _ROOM_FOR_NUMBERS, labels=index == 0)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper left", ncols=len(names), frameon=False, fontsize=9)
    figure.supxlabel(f"times better than {reference} (its bar is 1). {caption}", fontsize=7.5, color="0.35", x=0.01, ha="left")
    figure.savefig(path, dpi=200)


def _ratios(results: Results, reference: str) -> list[Spread]:
    found = [results.better((work, engine), (work, reference)) for work in results.works for engine in results.engines]
    return [ratio for ratio in found if ratio]


def _panel(axes: Axes, results: Results, reference: str, longest: float, *, labels: bool) -> None:
    works = results.works
    step = len(results.engines) + 1
    for offset, engine in enumerate(results.engines):
        for index, work in enumerate(works):
            _bar(axes, results, work, engine, reference, index * step + offset, first=index == 0)
    axes.axvline(1, color="0.4", linewidth=0.8, zorder=0)
    axes.set_yticks([i * step + (step - 2) / 2 for i in range(len(works))], works if labels else [""] * len(works), fontsize=9)
    axes.set_ylim(len(works) * step - 1.2, -0.8)
    axes.tick_params(left=False, labelsize=8)
    axes.tick_params(axis="y", labelsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(results.model, fontsize=10, loc="left", fontweight="bold")
    axes.set_xlim(0, longest)


def _bar(axes: Axes, results: Results, work: str, engine: str, reference: str, place: int, *, first: bool) -> None:
    label = engine if first else None
    ratio = results.better((work, engine), (work, reference))
    if ratio is None:
        axes.barh(place, 0, color=COLOURS.get(engine, "0.6"), label=label)
        return
    error = [[ratio.middle - ratio.low], [ratio.high - ratio.middle]]
    axes.barh(place, ratio.middle, height=0.82, color=COLOURS.get(engine, "0.6"), label=label, xerr=error if engine != reference else None,
              error_kw={"elinewidth": 0.7, "ecolor": "0.25"})  # fmt: skip
    axes.annotate(
        cell(results, work, engine, spread=False),
        (max(ratio.high, ratio.middle), place),
        (4, 0),
        textcoords="offset points",
        va="center",
        fontsize=7.5,
    )
