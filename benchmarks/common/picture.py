"""Pictures of results."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .report import cell
from .samples import Results, Spread

COLOURS = {"mlxinfer": "#2563eb", "mlxinfer-plain": "#93c5fd", "llama.cpp": "#8d99a6", "mlx-lm": "#d9a441"}
_SPACE_FOR_NUMBERS = 1.35
WIDTH_INCHES, ROW_INCHES = 9.0, 0.21


def finish(figure: Figure, path: Path, caption: str) -> None:
    """Add a caption below the figure, and write the file."""
    figure.supxlabel(caption, fontsize=7.5, color="0.35", x=0.01, ha="left")
    figure.savefig(path, dpi=200)


def draw(models: list[Results], reference: str, path: Path, caption: str) -> None:
    """Draw a panel per model and a group of bars per work: each engine relative to `reference`, longer is better."""
    bars = max(len(results.works) * (len(results.engines) + 1) for results in models)
    figure = Figure(figsize=(WIDTH_INCHES, 1.0 + ROW_INCHES * bars), layout="constrained", facecolor="white")
    ratios = [_ratio(results, work, engine, reference) for results in models for work in results.works for engine in results.engines]
    longest = max((ratio.high for ratio in ratios if ratio), default=1.0)
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    for index, (results, axes) in enumerate(zip(models, panels, strict=True)):
        _panel(axes, results, reference, longest * _SPACE_FOR_NUMBERS, labels=index == 0)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper left", ncols=len(names), frameon=False, fontsize=9)
    finish(figure, path, f"times better than {reference} (its bar is 1). {caption}")


def _ratio(results: Results, work: str, engine: str, reference: str) -> Spread | None:
    return results.better((work, engine), (work, reference))


def _panel(axes: Axes, results: Results, reference: str, longest: float, *, labels: bool) -> None:
    works, step = results.works, len(results.engines) + 1
    for offset, engine in enumerate(results.engines):
        for index, work in enumerate(works):
            place, ratio = index * step + offset, _ratio(results, work, engine, reference)
            found = ratio or Spread(0, 0, 0)
            error = [[found.middle - found.low], [found.high - found.middle]]
            axes.barh(place, found.middle, height=0.82, color=COLOURS.get(engine, "0.6"), label=None if index else engine,
                      xerr=error if ratio and engine != reference else None, error_kw={"elinewidth": 0.7, "ecolor": "0.25"})  # fmt: skip
            if ratio:
                text = cell(results, work, engine, spread=False)
                axes.annotate(text, (ratio.high, place), (4, 0), textcoords="offset points", va="center", fontsize=7.5)
    axes.axvline(1, color="0.4", linewidth=0.8, zorder=0)
    axes.set_yticks([i * step + (step - 2) / 2 for i in range(len(works))], works if labels else [""] * len(works), fontsize=9)
    axes.set_ylim(len(works) * step - 1.2, -0.8)
    axes.tick_params(left=False, labelsize=8)
    axes.tick_params(axis="y", labelsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(results.model, fontsize=10, loc="left", fontweight="bold")
    axes.set_xlim(0, longest)
