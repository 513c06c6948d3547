"""Pictures of an answer, with matplotlib."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from math import exp
from typing import TYPE_CHECKING

from ..errors import MLXInferError
from ..types import Completion, TokenLogprob

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Picture:
    """A matplotlib `figure` that shows itself as the result of a cell, without pyplot's global state."""

    figure: Figure

    def _repr_png_(self) -> bytes:
        png = BytesIO()
        self.figure.savefig(png, format="png", dpi=110)
        return png.getvalue()


def logprobs_picture(completion: Completion) -> Picture:
    """A bar per generated token (the first 64): the probability the model gave it, and beside it the likeliest token it did not take.

    The completion must have been made with `SamplingParams(logprobs=2)` or more.
    Raises `MLXInferError` if it was not, or without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MLXInferError("pictures need matplotlib: pip install 'mlxinfer[notebook]'") from error
    if not completion.logprobs:
        raise MLXInferError("this completion has no log-probabilities: generate it with SamplingParams(logprobs=2)")
    tokens = completion.logprobs[:MOST_TOKENS]
    figure = Figure(figsize=(6.0, 0.6 + 0.24 * len(tokens)), layout="constrained")
    axes = figure.subplots()
    rows, chances = range(len(tokens)), [exp(token.logprob) for token in tokens]
    axes.barh(rows, chances, color=[_colour(chance) for chance in chances], height=0.75)
    axes.set_yticks(rows, [_label(token.text) for token in tokens], fontfamily="monospace")
    axes.set_ylim(len(tokens) - 0.4, -0.6)
    axes.set_xlim(0, 1)
    for row, token in enumerate(tokens):
        axes.text(1.02, row, _runner_up(token), va="center", fontsize=8, color="0.45", fontfamily="monospace")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("probability of each token, and the likeliest other one", fontsize=9, loc="left")
    return Picture(figure)


def _runner_up(token: TokenLogprob) -> str:
    return next((f"{_label(text)} {exp(logprob):.2f}" for token_id, text, logprob in token.top if token_id != token.token_id), "")


def _label(text: str) -> str:
    """A token as a label: quoted, so that spaces are seen, and without a `$` that matplotlib would take for a formula."""
    return repr(text).replace("$", r"\$")


def _colour(chance: float) -> str:
    return "#3b7dd8" if chance >= 0.5 else "#e0a030" if chance >= 0.1 else "#d04a3a"
