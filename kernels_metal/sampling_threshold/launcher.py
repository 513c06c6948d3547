"""Finds the thresholds of top-k and top-p in rows of logits, without sorting them."""

from __future__ import annotations

import mlx.core as mx

from ...errors import UnsupportedShapeError
from ..executors import get_kernel

_FILE = "sampling_threshold/sampling_threshold.metal"
_BLOCK = 128
LEAST_LOGITS, MOST_LOGITS = 8 * _BLOCK, 2**24
"""Range of vocabularies: fewer logits are sorted as fast; more could not be counted in float32."""


def threshold(logits: mx.array, limits: mx.array) -> mx.array:
    """Return the lowest logit that stays in each row of float32 `[R, vocab]`, float32 `[R, 1]`; minus infinity if nothing is cut. See
    `reference.threshold`.

    `limits` float32 `[max(R, 4), 2]` has top_k (vocab or more: no cut) and top_p (1: no cut) of each row. Raises ValueError for arrays that
    do not fit, and `UnsupportedShapeError` for vocabularies below 1024 or above 2^24 tokens.
    """
    rows, size = _check(logits, limits)
    blocks, template = -(-size // _BLOCK), [("SIZE", size)]
    maxima, sums = get_kernel(_FILE, "sampling_blocks")(
        inputs=[logits],
        template=template,
        output_shapes=[(rows, blocks), (rows, blocks)],
        output_dtypes=[mx.float32, mx.float32],
        grid=(256, -(-blocks // 8), rows),
        threadgroup=(256, 1, 1),
    )
    return get_kernel(_FILE, "sampling_threshold")(
        inputs=[logits, maxima, sums, limits],
        template=template,
        output_shapes=[(rows, 1)],
        output_dtypes=[mx.float32],
        grid=(256, rows, 1),
        threadgroup=(256, 1, 1),
    )[0]


def _check(logits: mx.array, limits: mx.array) -> tuple[int, int]:
    if (
        logits.ndim != 2
        or logits.shape[0] == 0
        or limits.shape != (max(logits.shape[0], 4), 2)
        or {logits.dtype, limits.dtype} != {mx.float32}
    ):
        found = ", ".join(f"{str(a.dtype).removeprefix('mlx.core.')}{list(a.shape)}" for a in (logits, limits))
        raise ValueError(f"logits and limits are {found}; expected float32 [rows, vocabulary] and [rows, 4 at least][2]")
    if not LEAST_LOGITS <= logits.shape[1] <= MOST_LOGITS:
        raise UnsupportedShapeError(f"no search among {logits.shape[1]} logits; there must be {LEAST_LOGITS} to {MOST_LOGITS}")
    return logits.shape[0], logits.shape[1]
