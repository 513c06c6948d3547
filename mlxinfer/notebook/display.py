"""Stream an answer into a notebook cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from html import escape
from inspect import isasyncgen
from io import BytesIO
from math import exp
from time import perf_counter
from typing import TYPE_CHECKING, Any, Union

from ..errors import MLXInferError
from ..types import Chunk, Completion, SamplingParams, TokenLogprob, Usage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..engine.llm import LLM

MOST_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Picture:
    """A matplotlib `figure` that shows itself as the result of a cell, without pyplot's global state."""

    figure: Figure
    """matplotlib's figure."""

    def _repr_png_(self) -> bytes:
        png = BytesIO()
        self.figure.savefig(png, format="png", dpi=110)
        return png.getvalue()


def logprobs_picture(completion: Completion) -> Picture:
    """A bar per generated token (the first 64): the probability the model gave it, next to the likeliest token that it did not take.

    The completion must have been made with `SamplingParams(logprobs=2)` or more.
    Raises `MLXInferError` if it was not, or without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MLXInferError("pictures need matplotlib: pip install '.[notebook]' in a clone of mlxinfer") from error
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
    """A token as a label: quoted to make spaces visible, and without a `$` that matplotlib would take for a formula."""
    return repr(text).replace("$", r"\$")


def _colour(chance: float) -> str:
    return "#3b7dd8" if chance >= 0.5 else "#e0a030" if chance >= 0.1 else "#d04a3a"


Messages = Sequence[Mapping[str, Any]]

_REDRAW_S = 0.05
"""Time between two updates of a cell: the front end draws each of them."""


def stream(llm: LLM, prompt: Union[str, Messages], params: SamplingParams | None = None) -> Completion:
    """Answer a prompt, or a list of messages, into the output of the running cell.

    Interrupting the cell stops the generation: the text so far stays, and is returned with `finish_reason` "cancelled". Outside of IPython
    the text is printed. Raises what `LLM.stream` raises, and `MLXInferError` for an `AsyncLLM`.
    """
    chunks = llm.stream(prompt, params) if isinstance(prompt, str) else llm.stream_chat(prompt, params)
    if isasyncgen(chunks):
        raise MLXInferError("stream needs an LLM: an AsyncLLM's answer is read with `async for chunk in llm.stream(prompt, params)`")
    collected: list[Chunk] = []
    cell = _Cell()
    with closing(chunks):
        try:
            for chunk in chunks:
                collected.append(chunk)
                cell.show(chunk.text)
        except KeyboardInterrupt:
            pass
    completion = _completion(collected)
    cell.end(completion)
    return completion


def _completion(chunks: list[Chunk]) -> Completion:
    token_ids = [token for chunk in chunks for token in chunk.token_ids]
    logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs or []]
    last = chunks[-1] if chunks else Chunk("")
    usage = last.usage or Usage(prompt_tokens=0, completion_tokens=len(token_ids))
    text, reasoning = ("".join(getattr(chunk, name) for chunk in chunks) for name in ("text", "reasoning"))
    return Completion(text, token_ids, last.finish_reason or "cancelled", usage, logprobs or None, reasoning=reasoning or None)


class _Cell:
    """One display that is drawn anew as the text grows; plain printing where there is no IPython kernel."""

    def __init__(self) -> None:
        self._text = ""
        self._drawn = 0.0
        self._handle = _display_handle()

    def show(self, text: str) -> None:
        if self._handle is None:
            print(text, end="", flush=True)  # noqa: T201
            return
        self._text += text
        if perf_counter() - self._drawn >= _REDRAW_S:
            self._draw("")

    def end(self, completion: Completion) -> None:
        if self._handle is None:
            print()  # noqa: T201
            return
        speed = f"{completion.usage.decode_tps:.1f} tokens/s" if completion.usage.decode_tps else completion.finish_reason
        self._draw(f"{completion.usage.completion_tokens} tokens · {speed}" if completion.finish_reason != "cancelled" else "stopped")

    def _draw(self, footer: str) -> None:
        self._drawn = perf_counter()
        html = f'<div style="white-space: pre-wrap; max-width: 50em">{escape(self._text)}</div>'
        if footer:
            html += f'<div style="opacity: 0.6; font-size: 85%">{escape(footer)}</div>'
        self._handle.update({"text/plain": self._text, "text/html": html}, raw=True)


def _display_handle() -> Any:
    """A display of the running IPython kernel, or None."""
    try:
        from IPython import display, get_ipython
    except ImportError:
        return None
    shell = get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    return display.display({"text/plain": "", "text/html": ""}, raw=True, display_id=True)  # type: ignore[no-untyped-call]
