"""A picture of the computed speeds: this project compared with mlx-lm, a bar per chip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..common.picture import COLOURS, WIDTH_INCHES, finish
from .chips import CHIPS
from .report import WORKS, speed

_TITLES = {"decode 1": "one answer", "decode 8": "eight answers together", "prefill": "reading a prompt"}


def draw(about: dict[str, Any], path: Path) -> None:
    """Draw a row of panels per model, a panel per kind of work. Bars are ratios, with their range; labels are this project's tokens per
    second."""
    models = about["models"]
    figure = Figure(figsize=(WIDTH_INCHES, 0.6 + 3.1 * len(models)), layout="constrained", facecolor="white")
    panels = figure.subplots(len(models), len(WORKS), squeeze=False)
    for (name, found), row in zip(models.items(), panels, strict=True):
        for index, (work, axes) in enumerate(zip(WORKS, row, strict=True)):
            _panel(axes, found["counts"], work, about["prompt"], labels=index == 0)
            axes.set_title(f"{name}: {_TITLES[work]}" if index == 0 else _TITLES[work], fontsize=9, loc="left", fontweight="bold")
    finish(
        figure,
        path,
        "computed, not measured: mlxinfer's speed divided by mlx-lm's, for stages of 1.5 to 5 us; numbers are mlxinfer's tokens per second",
    )


def _panel(axes: Axes, counts: list[dict[str, Any]], work: str, prompt: int, *, labels: bool) -> None:
    for place, chip in enumerate(CHIPS):
        ours, theirs = (speed(counts, program, work, chip.name, prompt) for program in ("mlxinfer", "mlx-lm"))
        least, most = sorted(a / b for a, b in zip(ours, theirs, strict=True))
        axes.barh(place, least, height=0.75, color=COLOURS["mlxinfer"])
        axes.barh(place, most - least, left=least, height=0.75, color=COLOURS["mlxinfer"], alpha=0.4)
        numbers = dict.fromkeys(f"{value:.0f}" if value >= 10 else f"{value:.1f}" for value in ours)
        axes.annotate("–".join(numbers), (most, place), (3, 0), textcoords="offset points", va="center", fontsize=6.5)
    axes.axvline(1, color=COLOURS["mlx-lm"], linewidth=1.2)
    axes.set_yticks(range(len(CHIPS)), [chip.name for chip in CHIPS] if labels else [""] * len(CHIPS), fontsize=7)
    axes.set_ylim(len(CHIPS) - 0.4, -0.6)
    axes.margins(x=0.15)
    axes.tick_params(left=False, labelsize=7)
    axes.spines[["top", "right", "left"]].set_visible(False)
