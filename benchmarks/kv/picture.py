"""KL divergence over bits per value: a line per engine, a panel per model, on its shortest text, where every cache was measured."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..picture import COLOURS

_INCHES = 3.6


def draw(rows: list[dict[str, str]], path: Path) -> None:
    models = dict.fromkeys(row["model"] for row in rows)
    places = [(model, min((row["context"] for row in rows if row["model"] == model), key=int)) for model in models]
    figure = Figure(figsize=(_INCHES * len(places), _INCHES), layout="constrained", facecolor="white")
    panels = figure.subplots(1, len(places), squeeze=False, sharey=True)[0]
    for axes, place in zip(panels, places, strict=True):
        _panel(axes, [row for row in rows if (row["model"], row["context"]) == place])
        axes.set_title(f"{place[0]}, {place[1]} tokens", fontsize=9, loc="left", fontweight="bold")
    panels[0].set_ylabel("KL divergence from 16 bits, nats", fontsize=8)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper left", ncols=len(names), frameon=False, fontsize=9)
    figure.savefig(path, dpi=200)


def _panel(axes: Axes, rows: list[dict[str, str]]) -> None:
    for engine in dict.fromkeys(row["engine"] for row in rows):
        points = sorted((float(r["bits"]), float(r["mean_kl"]), r["cache"]) for r in rows if r["engine"] == engine)
        line = [point for point in points if "first" not in point[2]]
        colour = COLOURS.get(engine, "0.5")
        axes.plot([p[0] for p in line], [p[1] for p in line], marker="o", markersize=3.5, linewidth=1, color=colour, label=engine)
        for bits, kl, cache in points:
            beside = (bits, kl, cache) in line
            if not beside:
                axes.plot([bits], [kl], marker="o", markersize=3.5, markerfacecolor="white", color=colour)
            axes.annotate(cache, (bits, kl), (3, 3) if beside else (-3, -9), textcoords="offset points", fontsize=6, color=colour,
                          ha="left" if beside else "right")  # fmt: skip
    axes.set_yscale("log")
    axes.set_xlabel("bits a value, scales included", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
