"""Many rows over a quantized past by MLX's own attention: the past is unpacked for the layer, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ...kernels_metal.paged_attention.reference import attention
from ...kernels_metal.paged_attention.tiles import Shape
from ...kernels_metal.unseal_pages.launcher import FILLED, FIRST, RAW, SEALED, plan_unseal, unseal_pages
from ..base import PAGE, AttentionParams, Segment
from ..store import Filled, LayerStore
from .reference import PlainStep


def attend_unsealed(
    step: PlainStep,
    store: LayerStore,
    segment: Segment,
    q: mx.array,
    tails: Sequence[mx.array],
    full: Filled | None,
    params: AttentionParams,
    shape: Shape,
) -> mx.array:
    """Answer queries `[Hq, L, D]` of a segment over several pages: `[Hq, L, Dv]`.

    `tails` are the keys and values of all pages since the last sealed one, `[Hkv, pages, 64, D]`, `full` what became of those that the step
    filled. Queries see earlier pages as sealed, their own page as it is.
    """
    last = segment.past + segment.count
    oldest = 0 if step.group.window is None else max(segment.past - step.group.window + 1, 0)
    start, pages = step.group.tables[segment.slot].from_position(oldest)
    filled, first = (full.pages, full.first) if full else ([], [])
    # A first page that stays at 16 bits is the same in both forms.
    places = [(FIRST, ~p) if p < 0 else (SEALED, p) for p in pages] + [(RAW, 0)] * (1 if first else 0)
    places += [(FILLED, page) for page in range(segment.filled - (1 if first else 0))]
    places += [(RAW, page) for page in range(tails[0].shape[1])]
    counts = [arrays[0].shape[1] if arrays else 0 for arrays in (store.sealed, filled, store.first, tails)]
    plan = plan_unseal(places, (counts[0], counts[1], counts[2], counts[3]))
    k, v = unseal_pages(store.sealed, filled, store.first, tails, plan, shape, after=q)
    size = (len(pages) + segment.filled) * PAGE + last - segment.past // PAGE * PAGE
    mask = step.mask(segment, start)
    return attention(q, k[:, :size], v[:, :size], scale=params.scale, softcap=params.softcap, sinks=params.sinks, mask=mask)
