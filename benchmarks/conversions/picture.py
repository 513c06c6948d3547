"""KL divergence over bits per weight: a line for each program, a panel for each model, and one more for its layers alone."""

from __future__ import annotations

import re
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from .report import Result

_COLOURS = {
    "mx.quantize": "#d9a441",
    "mlx-lm recipes": "#b07d2b",
    "mlx-lm GPTQ": "#7c5a1e",
    "mlx-lm dynamic": "#a16207",
    "mlx-lm DWQ": "#ca8a04",
    "llama.cpp, imatrix": "#6b7280",
    "mlxinfer fit": "#7dd3fc",
    "mlxinfer gptq": "#2563eb",
    "mlxinfer plan": "#1e3a8a",
    "GPTQ into Q4_K": "#16a34a",
    "trellis, emulated": "#a855f7",
}
"""What is drawn: other engines are in the table only."""
_MIXTURES = ("llama", "mlx-lm")
"""Whose results are named, and no steps of one setting."""
_LAYERS = "layers only"
_FEWEST = 4
"""Points that make a panel worth its room."""
_INCHES = 4.6
_TICKS = [1, 2, 3, 5]
_TOKENS = re.compile(r", ([\d,]+) tokens$")


def draw(results: list[Result], path: Path) -> None:
    """Write the picture."""
    parts: dict[str, list[Result]] = {}
    for each in results:
        parts.setdefault(f"{each['model']}, {_LAYERS}" if _LAYERS in each["way"] else each["model"], []).append(each)
    shown = {title: points for title, points in sorted(parts.items()) if len(points) >= _FEWEST} or parts
    figure = Figure(figsize=(_INCHES * len(shown), _INCHES), layout="constrained", facecolor="white")
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, (title, points) in zip(panels, shown.items(), strict=True):
        _panel(axes, points)
        axes.set_title(title, fontsize=9, loc="left", fontweight="bold")
    panels[0].set_ylabel("KL divergence from the source, nats", fontsize=8)
    found = {name: handle for axes in panels for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    names = [name for name in _COLOURS if name in found]
    figure.legend([found[name] for name in names], names, loc="outside upper left", ncols=2 + len(shown), frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def _panel(axes: Axes, results: list[Result]) -> None:
    for engine, colour in _COLOURS.items():
        points = sorted((each for each in results if each["engine"] == engine), key=lambda each: float(each["bpw"]))
        chosen = [each for each in points if each is _of_most_tokens(each, points)]
        if not points:
            continue
        x, y = [each["bpw"] for each in chosen], [each["kl_mean"] for each in chosen]
        errors = [each["kl_stderr"] for each in chosen]
        line = "none" if engine.startswith(_MIXTURES) else "--" if engine.endswith("emulated") else "-"
        axes.errorbar(x, y, errors, marker="o", markersize=3.5, linewidth=1.2, linestyle=line, color=colour, label=engine, capsize=2)
        others = [each for each in points if each not in chosen]
        axes.plot([e["bpw"] for e in others], [e["kl_mean"] for e in others], "o", markersize=3.5, color=colour, fillstyle="none")
        for each in chosen if engine.startswith(_MIXTURES) else ():
            name = _TOKENS.sub("", each["way"].partition(": ")[2]).removesuffix(f", {_LAYERS}")
            axes.annotate(name, (each["bpw"], each["kl_mean"]), (5, 3), textcoords="offset points", fontsize=6.5, color=colour)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=_TICKS))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("bits per weight, all of them, scales included", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(visible=True, which="major", linewidth=0.4, color="#e5e7eb")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _of_most_tokens(point: Result, points: list[Result]) -> Result:
    """Among those of one size, which the line goes through: the others are dots beside it."""
    same = [each for each in points if abs(each["bpw"] - point["bpw"]) < 0.02]
    return max(same, key=_tokens)


def _tokens(point: Result) -> float:
    found = _TOKENS.search(point["way"])
    return int(found[1].replace(",", "")) if found else float("inf")
