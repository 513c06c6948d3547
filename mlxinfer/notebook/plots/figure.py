"""Matplotlib figures as results of a cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

from ...errors import MLXInferError
from ...util.installing import install_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, YELLOW, RED, GREY = "#3b7dd8", "#e0a030", "#d04a3a", "#b8bcc2"


def new_figure(width: float, height: float, *, rows: int = 1, heights: Sequence[float] = (1.0,)) -> tuple[Figure, Any]:
    """Create a figure of `width` by `height` inches with one axis, or an array of `rows` axes.

    The background is white in any theme, to match the colours. Raises `MLXInferError` without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MLXInferError(f"pictures need matplotlib: {install_line('matplotlib')}") from error
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    return figure, figure.subplots(rows, sharex=True, height_ratios=heights) if rows > 1 else figure.subplots()


@dataclass(frozen=True, slots=True)
class Picture:
    """A matplotlib figure displayed as a cell's result, without pyplot's global state."""

    figure: Figure
    """The matplotlib figure."""

    def _repr_png_(self) -> bytes:
        png = BytesIO()
        self.figure.savefig(png, format="png", dpi=110)
        return png.getvalue()
