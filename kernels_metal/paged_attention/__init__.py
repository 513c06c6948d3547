"""Attention over the pages of the cache: kernels for a GPU, and the same in plain MLX."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..executors import available
from .launcher import paged_attention_decode
from .plan import DecodePlan
from .reference import attention_over_pages


def decode_attention(
    q: mx.array,
    sealed: Sequence[mx.array],
    first: Sequence[mx.array],
    open_pages: Sequence[mx.array],
    plan: DecodePlan,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """`paged_attention_decode` where kernels can run, the plain reference elsewhere."""
    run = paged_attention_decode if available() else attention_over_pages
    return run(q, sealed, first, open_pages, plan, scale=scale, softcap=softcap, sinks=sinks)
