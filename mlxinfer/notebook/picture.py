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
    """A bar per generated token (the first 64): the probability the model gave it, and below the likeliest token it did not take.

    The completion must have been made with `SamplingParams(logprobs=1)` or more.
    Raises `MLXInferError` if it was not, or without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MLXInferError("pictures need matplotlib: pip install 'mlxinfer[notebook]'") from error
    if not completion.logprobs:
        raise MLXInferError("this completion has no log-probabilities: generate it with SamplingParams(logprobs=3)")
    tokens = completion.logprobs[:MOST_TOKENS]
    figure = Figure(figsize=(max(4.0, 0.36 * len(tokens)), 2.8), layout="constrained")
    axes = figure.subplots()
    chances = [exp(token.logprob) for token in tokens]
    rows = range(len(tokens))
    axes.bar(rows, chances, color=[_colour(chance) for chance in chances], width=0.8)
    axes.set_xticks(rows, [f"{_label(token.text)}\n({_label(_runner_up(token))})" for token in tokens], rotation=60, ha="right", fontsize=8)
    axes.set_ylim(0, 1)
    axes.set_xlim(-0.6, len(tokens) - 0.4)
    axes.set_ylabel("probability")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("each token, and (the likeliest other one)", fontsize=9, loc="left")
    return Picture(figure)


def _runner_up(token: TokenLogprob) -> str:
    return next((text for token_id, text, _ in token.top if token_id != token.token_id), "")


def _label(text: str) -> str:
    """A token as a label: spaces and line breaks seen, and no `$` that matplotlib would take for a formula."""
    return text.replace(" ", "␣").replace("\n", "⏎").replace("$", r"\$") or "·"


def _colour(chance: float) -> str:
    return "#3b7dd8" if chance >= 0.5 else "#e0a030" if chance >= 0.1 else "#d04a3a"
