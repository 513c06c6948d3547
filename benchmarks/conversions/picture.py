"""KL divergence over bits per weight: a line for each program, a panel for each model, and one more for its layers alone."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .report import Result

_COLOURS = {
    "mx.quantize": "#d9a441",
    "mlx-lm recipes": "#b07d2b",
    "mlx-lm GPTQ": "#7c5a1e",
    "mlx-lm dynamic": "#a16207",
    "mlx-lm DWQ": "#ca8a04",
    "llama.cpp, imatrix": "#8d99a6",
    "mlxinfer fit": "#93c5fd",
    "mlxinfer gptq": "#3b82f6",
    "mlxinfer plan": "#1e3a8a",
    "GPTQ into Q4_K": "#16a34a",
    "trellis, emulated": "#a855f7",
}
_LAYERS = "layers only"
_INCHES = 4.2


def draw(results: list[Result], path: Path) -> None:
    parts: dict[str, list[Result]] = {}
    for each in results:
        parts.setdefault(f"{each['model']}, {_LAYERS}" if _LAYERS in each["way"] else each["model"], []).append(each)
    figure = Figure(figsize=(_INCHES * len(parts), _INCHES), layout="constrained", facecolor="white")
    panels = figure.subplots(1, len(parts), squeeze=False)[0]
    for axes, (title, points) in zip(panels, sorted(parts.items()), strict=True):
        _panel(axes, points)
        axes.set_title(title, fontsize=9, loc="left", fontweight="bold")
    panels[0].set_ylabel("KL divergence from the source, nats", fontsize=8)
    found = {name: handle for axes in panels for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(found.values(), found.keys(), loc="outside upper left", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def _panel(axes: Axes, results: list[Result]) -> None:
    for engine, colour in _COLOURS.items():
        points = sorted((each for each in results if each["engine"] == engine), key=lambda each: float(each["bpw"]))
        if not points:
            continue
        x, y = [each["bpw"] for each in points], [each["kl_mean"] for each in points]
        errors = [each["kl_stderr"] for each in points]
        line = "none" if engine == "mlx-lm recipes" else "--" if engine.endswith("emulated") else "-"
        axes.errorbar(x, y, errors, marker="o", markersize=3.5, linewidth=1.2, linestyle=line, color=colour, label=engine, capsize=2)
        for each in points:
            name = each["way"].partition(": ")[2]
            if engine.startswith(("llama", "mlx-lm")):
                axes.annotate(name, (each["bpw"], each["kl_mean"]), (4, 3), textcoords="offset points", fontsize=6, color=colour)
    axes.set_yscale("log")
    axes.set_xlabel("bits per weight, all of them, scales included", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
