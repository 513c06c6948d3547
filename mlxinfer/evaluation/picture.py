"""Plot of a comparison: KL divergence over bits per weight."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ..errors import EvaluationError
from ..util.installing import install_line
from .figures import Figures

KINDS = (".svg", ".png", ".pdf")
_SIZE = (6.4, 4.4)


def check_picture(file: Path) -> None:
    """Raise `EvaluationError` if the picture could not be drawn. Called before anything is measured."""
    if file.suffix not in KINDS:
        raise EvaluationError(f"{file} is no name of a picture: it ends in {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    if not file.absolute().parent.is_dir():
        raise EvaluationError(f"the folder {file.absolute().parent} does not exist: create it first")
    if find_spec("matplotlib") is None:
        raise EvaluationError(f"a picture needs matplotlib: {install_line('matplotlib')}, or leave out --picture")


def draw(students: tuple[Figures, ...], teacher: str, file: Path) -> None:
    """Write the picture. Raises `EvaluationError` if it cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, layout="constrained", facecolor="white")
    axes = figure.subplots()
    shown = [each for each in students if each.kl_mean]
    for each in shown:
        axes.errorbar([each.bpw], [each.kl_mean or 0.0], [each.kl_stderr or 0.0], marker="o", markersize=5, capsize=3, color="#2563eb")
        axes.annotate(each.model, (each.bpw, each.kl_mean or 0.0), (7, 3), textcoords="offset points", fontsize=8)
    if shown:
        axes.set_yscale("log")
    axes.margins(x=0.25, y=0.2)
    axes.set_xlabel("bits on disk per weight")
    axes.set_ylabel("KL divergence, nats")
    axes.set_title(f"against {teacher}, {students[0].positions} positions", fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    except OSError as error:
        raise EvaluationError(f"cannot write {file}: {error.strerror or error}") from None
