"""A picture of three panels: steps, first answers, requests per second."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..batch.workloads import LLAMA_SERVER, MLX_SERVER, OURS
from ..common.picture import COLOURS, finish
from ..common.samples import Results
from .workloads import BYTE, ENGINE, ENGINES, FIRST, SHORT, step_name

_COLOUR = {ENGINE: "#93c5fd", OURS: COLOURS["mlxinfer"], LLAMA_SERVER: COLOURS["llama.cpp"], MLX_SERVER: COLOURS["mlx-lm"]}


def draw(results: Results, path: Path, caption: str) -> None:
    figure = Figure(figsize=(11, 3.4), layout="constrained", facecolor="white")
    panels = figure.subplots(1, 3)
    steps = [work for n in range(1, 17) if (work := step_name(n)) in results.works]
    _bars(panels[0], results, "ms from token to token", steps, 1000)
    _bars(panels[1], results, "ms from connecting", [BYTE, FIRST], 1000)
    _bars(panels[2], results, "requests/s", [SHORT], 1)
    panels[0].legend(frameon=False, fontsize=8)
    finish(figure, path, f"{results.model}. {caption}")


def _bars(axes: Axes, results: Results, title: str, works: list[str], scale: float) -> None:
    axes.set_title(title, fontsize=9, loc="left", fontweight="bold")
    for place, engine in enumerate(ENGINES):
        for group, work in enumerate(works):
            if found := results.spread(work, engine):
                x, middle, high = group + (place - 1.5) * 0.2, found.middle * scale, found.high * scale
                error = [[middle - found.low * scale], [high - middle]]
                axes.bar(x, middle, 0.18, yerr=error, error_kw={"elinewidth": 0.7, "ecolor": "0.25"}, color=_COLOUR[engine],
                         label=engine if not group else None)  # fmt: skip
                axes.annotate(f"{middle:.3g}", (x, high), (0, 2), textcoords="offset points", ha="center", fontsize=7)
    axes.set_xticks(range(len(works)), works, fontsize=8)
    axes.set_yscale("log")
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
