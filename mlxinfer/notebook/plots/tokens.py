"""Plots of token probabilities and traces."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from typing import Any, Union

import mlx.core as mx
import numpy as np

from ...errors import MLXInferError, SettingError
from ...interpret.trace import LogitLens, Trace
from ...types import Completion, TokenLogprob
from ...vision.picture import read_picture
from .figure import BLUE, RED, YELLOW, Picture, new_figure

MOST_TOKENS = 64


def logprobs_picture(completion: Completion) -> Picture:
    """Plot the probability of each generated token (the first 64) and of the likeliest other token.

    The completion needs `SamplingParams(logprobs=2)` or more. Raises `MLXInferError` otherwise, or without matplotlib.
    """
    if not completion.logprobs:
        raise MLXInferError("this completion has no log-probabilities: generate it with logprobs=2")
    tokens = completion.logprobs[:MOST_TOKENS]
    figure, axes = new_figure(6.0, 0.6 + 0.24 * len(tokens))
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


def lens_picture(trace: Union[Trace, LogitLens], *, last: int = 12) -> Picture:
    """Plot the likeliest next token after each layer at the `last` prompt tokens, coloured by probability.

    The lowest row is the embedding, the highest the model's output. Accepts a trace or its lens. Raises as `Trace.logit_lens` does, and
    `MLXInferError` without matplotlib.
    """
    lens = trace if isinstance(trace, LogitLens) else trace.logit_lens()
    count = min(last, len(lens.tokens))
    figure, axes = new_figure(1.2 + 0.95 * count, 0.7 + 0.22 * len(lens.layers))
    chances = np.array(lens.probability)[:, -count:]
    image = axes.imshow(chances, aspect="auto", origin="lower", vmin=0, vmax=1, cmap="Blues")
    for row, texts in enumerate(lens.texts):
        for column, text in enumerate(texts[-count:]):
            colour = "white" if chances[row, column] > 0.6 else "0.2"
            axes.text(column, row, _short(text), ha="center", va="center", fontsize=7, color=colour, fontfamily="monospace")
    axes.set_xticks(range(count), [_short(text) for text in lens.tokens[-count:]], fontsize=8, fontfamily="monospace")
    axes.set_yticks(range(0, len(lens.layers), 2), [str(layer) for layer in lens.layers[::2]], fontsize=7)
    axes.set_ylabel("stream that enters layer", fontsize=8)
    axes.set_title("what the model would say after each layer", fontsize=9, loc="left")
    figure.colorbar(image, label="probability", shrink=0.5)
    return Picture(figure)


def attention_picture(trace: Trace, layer: int, head: int) -> Picture:
    """Plot the attention of one head from each token (rows) to each token (columns). The trace needs "attention".

    Raises `SettingError` for an unknown layer or head, and `MLXInferError` without matplotlib.
    """
    patterns = trace["attention"]
    if layer not in patterns or not 0 <= head < patterns[layer].shape[0]:
        raise SettingError(f"the trace has no attention of layer {layer}, head {head}")
    size = min(max(3.0, 0.28 * len(trace)), 9.0)
    figure, axes = new_figure(size + 1, size)
    axes.imshow(np.array(patterns[layer][head]), vmin=0, vmax=1, cmap="Blues")
    if len(trace) <= MOST_TOKENS:
        labels = [_short(text) for text in trace.tokens]
        axes.set_xticks(range(len(trace)), labels, rotation=90, fontsize=7, fontfamily="monospace")
        axes.set_yticks(range(len(trace)), labels, fontsize=7, fontfamily="monospace")
    axes.set_title(f"layer {layer}, head {head}", fontsize=9, loc="left")
    return Picture(figure)


def surprise_picture(trace: Trace) -> Picture:
    """Plot the surprisal of each prompt token and the entropy of the next one. The trace needs "logits".

    Raises `MLXInferError` without matplotlib.
    """
    surprisal, entropy = np.array(trace.surprisal()), np.array(trace.entropy())
    figure, axes = new_figure(min(max(4.0, 0.32 * len(trace)), 14.0), 2.6)
    axes.bar(range(1, len(trace)), surprisal, color=RED, width=0.7, label="surprisal of the token")
    axes.plot(range(1, len(trace) + 1), entropy, color=BLUE, marker=".", linewidth=1, label="entropy before it")
    if len(trace) <= MOST_TOKENS:
        axes.set_xticks(range(len(trace)), [_short(text) for text in trace.tokens], rotation=90, fontsize=7, fontfamily="monospace")
    axes.set_ylabel("nats", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False)
    return Picture(figure)


def attribution_picture(trace: Trace, token: int | None = None, position: int = -1) -> Picture:
    """Plot each part's contribution to a token's logit. Raises as `Trace.attribution` does."""
    shares = trace.attribution(token, position)
    figure, axes = new_figure(7.0, 2.6)
    layers = range((len(shares) - 1) // 2)
    for offset, part, colour in ((-0.2, "attention", BLUE), (0.2, "mlp", YELLOW)):
        axes.bar([layer + offset for layer in layers], [shares[f"{part} {layer}"] for layer in layers], 0.4, color=colour, label=part)
    axes.bar([-1], [shares["embedding"]], 0.6, color=RED, label="embedding")
    axes.axhline(0, color="0.6", linewidth=0.6)
    axes.set_xlabel("layer", fontsize=8)
    axes.set_ylabel("logit", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False)
    return Picture(figure)


def heat_picture(values: mx.array, *, rows: str, columns: str, title: str = "", tokens: Sequence[str] = ()) -> Picture:
    """Plot a matrix `[rows, columns]` around zero, such as the effect of a patch at each layer and position.

    `rows` and `columns` are axis labels; `tokens` label the columns, for example `trace.tokens`. Raises `MLXInferError` without matplotlib.
    """
    numbers = np.array(values)
    most = float(np.abs(numbers).max()) or 1.0
    figure, axes = new_figure(2 + 0.3 * numbers.shape[1], 1.2 + 0.16 * numbers.shape[0])
    image = axes.imshow(numbers, aspect="auto", origin="lower", vmin=-most, vmax=most, cmap="RdBu")
    axes.set_xlabel(columns, fontsize=8)
    axes.set_ylabel(rows, fontsize=8)
    if 0 < len(tokens) <= MOST_TOKENS:
        axes.set_xticks(range(len(tokens)), [_short(text) for text in tokens], rotation=90, fontsize=7, fontfamily="monospace")
    axes.set_title(title, fontsize=9, loc="left")
    figure.colorbar(image)
    return Picture(figure)


def image_picture(trace: Trace, values: Any, image: int = 0, *, picture: Any = None, title: str = "", label: str = "") -> Picture:
    """Plot a value of each patch of an image of the prompt, such as `trace["attention"][layer][head, -1]`, over the image.

    `values` `[T]` are of all tokens of the trace. `picture` is the picture itself (a path, bytes, a PIL image or a uint8 array), drawn
    below in grey; None draws the values alone. `label` names the colours. Raises `SettingError` for an unknown image or other values,
    `ImageError` for an unreadable picture, and `MLXInferError` without matplotlib.
    """
    if not 0 <= image < len(trace.images):
        raise SettingError(f"image {image} is not one of the {len(trace.images)} that were traced")
    traced = trace.images[image]
    patches, (height, width) = traced.patches(values), traced.size
    scale = 6.0 / max(height, width)
    figure, axes = new_figure(width * scale + 1.2, height * scale + 0.4)
    extent = (0, width, height, 0)
    if picture is not None:
        shades = read_picture(picture).pixels.mean(axis=-1)
        axes.imshow(shades, extent=extent, cmap="gray", vmin=0, vmax=255)
    drawn = axes.imshow(patches, extent=extent, cmap="viridis", alpha=1.0 if picture is None else 0.55)
    axes.set_xticks(np.linspace(0, width, 5))
    axes.set_yticks(np.linspace(0, height, 5))
    axes.tick_params(labelsize=7)
    axes.set_title(title, fontsize=9, loc="left")
    figure.colorbar(drawn, label=label)
    return Picture(figure)


def _short(text: str) -> str:
    return (_label(text)[1:-1] if text.strip() else "␣" * len(text))[:9]


def _runner_up(token: TokenLogprob) -> str:
    return next((f"{_label(text)} {exp(logprob):.2f}" for token_id, text, logprob in token.top if token_id != token.token_id), "")


def _label(text: str) -> str:
    """Return a token as a label: quoted to show spaces, with `$` escaped, which matplotlib treats as a formula."""
    return repr(text).replace("$", r"\$")


def _colour(chance: float) -> str:
    return BLUE if chance >= 0.5 else YELLOW if chance >= 0.1 else RED
