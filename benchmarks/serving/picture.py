"""Three panels: what the server adds to a step, how soon it answers, how many requests per second."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..batch.workloads import LLAMA_SERVER, MLX_SERVER, OURS
from ..picture import COLOURS
from ..samples import Results
from .workloads import BYTE, ENGINE, EVERYBODY, FIRST, SHORT, step_name

_COLOUR = {ENGINE: "#93c5fd", OURS: COLOURS["mlxinfer"], LLAMA_SERVER: COLOURS["llama.cpp"], MLX_SERVER: COLOURS["mlx-lm"]}


def draw(results: Results, path: Path, caption: str) -> None:
    figure = Figure(figsize=(11, 3.4), layout="constrained", facecolor="white")
    panels = figure.subplots(1, 3)
    steps = [work for n in range(1, 17) if (work := step_name(n)) in results.works]
    _bars(panels[0], results, "ms from token to token", steps, 1000)
    _bars(panels[1], results, "ms from connecting", [BYTE, FIRST], 1000)
    _bars(panels[2], results, "requests/s", [SHORT], 1)
    panels[0].legend(frameon=False, fontsize=8)
    figure.supxlabel(f"{results.model}. {caption}", fontsize=7.5, color="0.35", x=0.01, ha="left")
    figure.savefig(path, dpi=200)


def _bars(axes: Axes, results: Results, title: str, works: list[str], scale: float) -> None:
    axes.set_title(title, fontsize=9, loc="left", fontweight="bold")
    for place, engine in enumerate(EVERYBODY):
        for group, work in enumerate(works):
            found = results.spread(work, engine)
            if found:
                x = group + (place - 1.5) * 0.2
                error = [[(found.middle - found.low) * scale], [(found.high - found.middle) * scale]]
                axes.bar(x, found.middle * scale, 0.18, yerr=error, error_kw={"elinewidth": 0.7, "ecolor": "0.25"}, color=_COLOUR[engine],
                         label=engine if not group else None)  # fmt: skip
                axes.annotate(f"{found.middle * scale:.3g}", (x, found.high * scale), (0, 2), textcoords="offset points", ha="center",
                              fontsize=7)  # fmt: skip
    axes.set_xticks(range(len(works)), works, fontsize=8)
    axes.set_yscale("log")
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
