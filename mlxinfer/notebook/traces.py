"""HTML of traces and logit lenses, without matplotlib."""

from __future__ import annotations

from html import escape
from math import exp
from typing import Any, cast

import mlx.core as mx

from ..errors import MLXInferError
from ..interpret.trace import LogitLens, Trace
from .html import CELL, MUTED, TEXT, shaded, table

LAST = 12
"""Number of last prompt tokens in a lens."""


def trace_html(trace: Trace) -> str:
    """Return the prompt, shaded by probability (needs "logits"), and a table of the traced values."""
    chances = _chances(trace)
    tokens = "".join(shaded(text, chance) for text, chance in zip(trace.tokens, chances, strict=True))
    rows = [_held(what, trace[what]) for what in trace]
    return f'<div><div style="{TEXT}">{tokens}</div>{table(("traced", "layers", "shape"), rows)}</div>'


def _chances(trace: Trace) -> list[float | None]:
    """Return the probability of each token; None for the first one, without traced logits, or for a closed model."""
    if "logits" in trace and len(trace) > 1:
        try:
            return [None, *(exp(-value) for value in cast("list[float]", trace.surprisal().tolist()))]
        except MLXInferError:
            pass
    return [None] * len(trace)


def _held(what: str, values: Any) -> tuple[str, str, str]:
    if isinstance(values, mx.array):
        return what, "", _shape(values)
    layers = list(values)
    span = str(layers[0]) if len(layers) == 1 else f"{layers[0]} to {layers[-1]}" if layers else ""
    first = values[layers[0]] if layers else ()
    return what, span, " and ".join(map(_shape, first)) if isinstance(first, tuple) else _shape(first)


def _shape(array: mx.array) -> str:
    return " × ".join(map(str, array.shape))


def lens_html(lens: LogitLens) -> str:
    """Return the likeliest next token after each layer (rows, last layer on top) at the last prompt tokens (columns), shaded."""
    chances = cast("list[list[float]]", lens.probability.tolist())
    head = ("layer", *map(_label, lens.tokens[-LAST:]))
    lines = []
    for layer, texts, row in reversed(list(zip(lens.layers, lens.texts, chances, strict=True))):
        cells = "".join(_chance_cell(text, chance) for text, chance in zip(texts[-LAST:], row[-LAST:], strict=True))
        lines.append(f'<tr><td style="{CELL}">{layer}</td>{cells}</tr>')
    top = "<tr>" + "".join(f'<th style="{CELL}">{escape(each)}</th>' for each in head) + "</tr>"
    about = "the likeliest next token if each layer were the last one, shaded by its probability"
    return f'<div><div style="{MUTED}">{about}</div><table>{top}{"".join(lines)}</table></div>'


def _chance_cell(text: str, chance: float) -> str:
    shade = f"background:rgba(64,120,208,{0.6 * chance:.2f})"
    return f'<td style="{CELL};{shade}" title="{chance:.1%}">{escape(_label(text))}</td>'


def _label(text: str) -> str:
    """Return a token without its leading space; spaces alone become marks, control characters escapes."""
    return repr(text.strip())[1:-1] if text.strip() else repr(text)[1:-1].replace(" ", "␣")
