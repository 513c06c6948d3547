"""`unseal_pages` in plain MLX: pages as plain keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..paged_attention.tiles import Shape
from ..seal_page.reference import unseal_keys, unseal_values
from .launcher import FILLED, FIRST, SEALED, UnsealPlan


def unsealed(
    sealed: Sequence[mx.array],
    filled: Sequence[mx.array],
    first: Sequence[mx.array],
    raw: Sequence[mx.array],
    plan: UnsealPlan,
    shape: Shape,
) -> tuple[mx.array, mx.array]:
    """Like `launcher.unseal_pages`, page by page, in float32 and then rounded."""
    sources = {SEALED: (sealed, shape.k_bits, shape.v_bits), FILLED: (filled, shape.k_bits, shape.v_bits), FIRST: (first, 16, 16)}
    keys, values = [], []
    for kind, number in np.array(plan.table)[: 2 * plan.count].reshape(-1, 2).tolist():
        if kind in sources:
            arrays, k_bits, v_bits = sources[kind]
            own = [a[:, number] for a in arrays]
            count = 1 if k_bits == 16 else 2
            keys.append(unseal_keys(own[:count], k_bits))
            values.append(unseal_values(own[count:], v_bits, shape.value_dim))
        else:
            keys.append(raw[0][:, number].astype(mx.float32))
            values.append(raw[1][:, number].astype(mx.float32))
    k, v = (mx.concatenate(pages, axis=1).astype(shape.dtype) for pages in (keys, values))
    return k, v
