"""Plots of an engine: pages of its cache, errors of quantized pages, and steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...cache.pages import PAGE
from ...errors import SettingError
from ..cache_map import CacheGroup, CacheMap, CachePage
from .figure import BLUE, GREY, RED, YELLOW, Picture, new_figure

if TYPE_CHECKING:
    from ..cache_errors import CacheErrors
    from ..timeline import Timeline

_COLOURS = {"sealed": BLUE, "shared": YELLOW, "kept": GREY}
_MEANINGS = {"sealed": "sealed, of one sequence", "shared": "sealed, shared", "kept": "kept for whoever begins alike"}
_OPEN = "#9cc3f2"


def cache_picture(held: CacheMap, group: int = 0) -> Picture:
    """Plot the pages of one `group`: a row per running sequence, and below the pages of the prefix cache only.

    Numbers are page ids; equal numbers are one page in memory. A frame marks first pages at 16 bits, and the open page shows its fill.
    Raises `SettingError` for an unknown group, and `MLXInferError` without matplotlib.
    """
    if not 0 <= group < len(held.groups):
        raise SettingError(f"the cache has {len(held.groups)} groups of layers, from 0 on, and no group {group}")
    chosen = held.groups[group]
    by_id = {page.page: page for page in chosen.pages}
    lanes = _lanes(page for page in chosen.pages if not page.users)
    widest = max(
        [len(each.pages[group]) + each.first[group] + 1 for each in held.sequences] + [page.number + 1 for page in chosen.pages] + [4]
    )
    figure, axes = new_figure(1.6 + 0.42 * min(widest, 30), 1.1 + 0.36 * (len(held.sequences) + len(lanes)))
    labels: list[str] = []
    for row, sequence in enumerate(held.sequences):
        labels.append(f"sequence {sequence.slot}: {sequence.tokens} tokens")
        for place, page_id in enumerate(sequence.pages[group]):
            _box(axes, row, by_id[page_id], sequence.first[group] + place)
        end = sequence.first[group] + len(sequence.pages[group])
        axes.barh(row, 0.92, left=end + 0.04, height=0.74, facecolor="none", edgecolor=BLUE, linewidth=0.8, linestyle=":")
        axes.barh(row, 0.92 * sequence.open_tokens / PAGE, left=end + 0.04, height=0.74, color=_OPEN)
    for number, lane in enumerate(lanes):
        labels.append("prefix cache" if number == 0 else "")
        for page in lane:
            _box(axes, len(held.sequences) + number, page, page.number)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_xlim(0, widest)
    axes.set_xlabel(f"pages of {PAGE} tokens, from the beginning", fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(_title(chosen), fontsize=9, loc="left")
    _legend(axes, chosen.pages, opened=bool(held.sequences))
    return Picture(figure)


def _box(axes: Any, row: int, page: CachePage, place: int) -> None:
    frame = {"edgecolor": RED, "linewidth": 1.6} if page.page < 0 else {}
    axes.barh(row, 0.92, left=place + 0.04, height=0.74, color=_COLOURS[page.state], **frame)
    name = str(page.page) if page.page >= 0 else f"{~page.page}'"
    axes.text(place + 0.5, row, name, ha="center", va="center", fontsize=7, color="0.15" if page.state != "sealed" else "white")


def _lanes(pages: Iterable[CachePage]) -> list[list[CachePage]]:
    """Return the prefix cache's pages in as few rows as all branches need."""
    lanes: list[list[CachePage]] = []
    for page in pages:
        free = next((lane for lane in lanes if lane[-1].number < page.number), None)
        if free is None:
            lanes.append([page])
        else:
            free.append(page)
    return lanes


def _title(group: CacheGroup) -> str:
    reach = "" if group.window is None else f", a window of {group.window} tokens"
    return f"{len(group.layers)} layers{reach}: {' and '.join(sorted({form.name for form in group.formats}))} bits"


def _legend(axes: Any, pages: Sequence[CachePage], *, opened: bool) -> None:
    from matplotlib.patches import Patch

    states = {page.state for page in pages}
    patches = [Patch(color=_COLOURS[state], label=_MEANINGS[state]) for state in _COLOURS if state in states]
    if any(page.page < 0 for page in pages):
        patches.append(Patch(facecolor="none", edgecolor=RED, label="first page, 16 bits"))
    if opened:
        patches.append(Patch(color=_OPEN, label="open, 16 bits"))
    if patches:
        axes.figure.legend(handles=patches, loc="outside lower center", ncols=min(len(patches), 3), fontsize=7, frameon=False)


def cache_errors_picture(errors: CacheErrors) -> Picture:
    """Plot the relative errors of each page and layer: keys left, values right. Raises `MLXInferError` without matplotlib."""
    layers, pages = sorted({row.layer for row in errors.rows}), max(row.page for row in errors.rows) + 1
    found = np.zeros((2, len(layers), pages))
    for row in errors.rows:
        found[:, layers.index(row.layer), row.page] = row.keys, row.values
    figure, _ = new_figure(min(3.6 + 0.5 * pages, 12.0), 1.2 + 0.13 * len(layers))
    figure.clear()
    for place, (axes, name) in enumerate(zip(figure.subplots(1, 2, sharey=True), ("keys", "values"), strict=True)):
        image = axes.imshow(100 * found[place], aspect="auto", origin="lower", vmin=0, cmap="Oranges")
        axes.set_title(f"{name}, kv {errors.kv}", fontsize=9, loc="left")
        axes.set_xlabel("page", fontsize=8)
        axes.set_xticks(range(0, pages, max(pages // 8, 1)))
        axes.set_yticks(range(0, len(layers), 5), [str(layer) for layer in layers[::5]], fontsize=7)
        figure.colorbar(image, ax=axes, shrink=0.7, label="error, %" if place else "")
    figure.axes[0].set_ylabel("layer", fontsize=8)
    return Picture(figure)


def timeline_picture(timeline: Timeline) -> Picture:
    """Plot a recording from left to right: each request's parts above, the rows per step below.

    A grey line is waiting, a mark the first token. Raises `SettingError` for a recording without steps, `MLXInferError` without matplotlib.
    """
    requests, rows = timeline.requests, timeline.rows
    if not rows:
        raise SettingError("nothing was recorded: make requests inside `with recorded(llm) as timeline:`")
    figure, (above, below) = new_figure(9.0, 2.2 + 0.3 * len(requests), rows=2, heights=(0.4 + 0.3 * len(requests), 1.2))
    for number, request in enumerate(requests):
        above.plot([max(request.added, 0), request.started], [number, number], color=GREY, linewidth=1.2)
        if request.first_token:
            above.plot([request.first_token], [number - 0.42], marker="v", color=RED, markersize=4)
    for kind, colour, height in (("prompt", BLUE, 0.74), ("answer", YELLOW, 0.5)):
        parts = [row for row in rows if getattr(row, kind)]
        spans = [row.ended - row.began for row in parts]
        above.barh(
            [row.request for row in parts],
            spans,
            left=[row.began for row in parts],
            height=height,
            color=colour,
            edgecolor="white",
            linewidth=0.3,
        )
    labels = [f"{number}: {each.prompt_tokens - each.reused}+{each.answer_tokens}" for number, each in enumerate(requests)]
    above.set_yticks(range(len(requests)), labels, fontsize=8)
    above.set_ylim(len(requests) - 0.4, -0.8)
    above.set_title("request: tokens of the prompt to read + of the answer;  ▾ first token", fontsize=9, loc="left")
    _step_rows(below, timeline)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    return Picture(figure)


def _step_rows(axes: Any, timeline: Timeline) -> None:
    steps: dict[int, list[float]] = {}
    for row in timeline.rows:
        totals = steps.setdefault(row.step, [row.began, row.ended - row.began, 0, 0])
        totals[2] += row.answer
        totals[3] += row.prompt
    began, spans, answers, prompts = (np.array(column) for column in zip(*steps.values(), strict=True))
    axes.bar(began, answers, spans, align="edge", color=YELLOW, label="rows of answers")
    axes.bar(began, prompts, spans, bottom=answers, align="edge", color=BLUE, label="rows of prompts")
    axes.set_yscale("symlog", base=2, linthresh=4)
    axes.set_yticks([1, 4, 16, 64, 256, 1024], ["1", "4", "16", "64", "256", "1024"])
    axes.set_ylim(0, 1.2 * float((answers + prompts).max()))
    axes.set_ylabel("rows of a step", fontsize=8)
    axes.set_xlabel("seconds", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.figure.legend(loc="outside lower right", ncols=2, fontsize=7, frameon=False)
