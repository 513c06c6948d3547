"""Chunks of attention in plain MLX, so that a long past is never copied as a whole, and their memory. Computation and planning call the
same functions."""

from __future__ import annotations

import mlx.core as mx

from ...util.dataclass import dataclass
from ...util.device import is_gpu
from ..base import PAGE, AttentionSpec

JOINED_BYTES = 64 * 2**20
"""Maximum bytes of keys and values joined at a time; a single KV head may have more."""
MOST_SCORES = 2**24
"""Maximum scores in memory, without a fused kernel of MLX; a single row may have more."""
LONG_BYTES = JOINED_BYTES // 16
"""From this many bytes of keys and values on, sequences are attended to one after another."""
FUSED_DIMS = frozenset({64, 72, 80, 96, 128})
"""Head sizes for which MLX's Metal kernel stores no scores in memory. Its kernels for 192 and 256 are not used for many rows:
`ScaledDotProductAttention::use_fallback`, mlx 0.32."""
_FUSED_ROWS = 8
"""Maximum rows for which MLX chooses other kernels; their scores are small."""
_COPIES = 2
"""Joined keys and values are there twice: as pages that were gathered from all over the pool, and as rows in order."""
_UNSEALED = 3
"""Number of float32 arrays of a dequantized past that exist together."""
_SCORE_COPIES = 3
"""Scores, masked scores, and their softmax."""


def is_fused(spec: AttentionSpec, rows: int, *, softcap: bool) -> bool:
    """True if MLX attends with `rows` queries without writing scores to memory."""
    return is_gpu() and not softcap and rows > _FUSED_ROWS and spec.key_dim == spec.value_dim and spec.key_dim in FUSED_DIMS


def heads_at_once(spec: AttentionSpec, query_heads: int, rows: int, keys: int, size: int, *, fused: bool) -> int:
    """KV heads that are attended to together, for `rows` queries and `keys` keys with `size` bytes a number."""
    most = JOINED_BYTES // max((spec.key_dim + spec.value_dim) * keys * size, 1)
    if not fused:
        most = min(most, MOST_SCORES // max(query_heads // spec.kv_heads * rows * keys, 1))
    return max(min(most, spec.kv_heads), 1)


def rows_at_once(query_heads: int, rows: int, keys: int, *, fused: bool) -> int:
    """Return the number of queries whose scores fit in memory; `query_heads` are those of one chunk."""
    return rows if fused else max(min(MOST_SCORES // max(query_heads * keys, 1), rows), 1)


@dataclass(frozen=True, slots=True)
class PlainSize:
    """Memory of a layer's attention in plain MLX during a step, without the cache and its result."""

    spec: AttentionSpec
    rows: int
    size: int
    """Bytes of a number of the compute dtype."""
    quantized: bool
    """True if the past must be dequantized."""
    softcap: bool
    """True if scores are capped, which is computed in float32."""

    def bytes(self, context: int, sequences: int) -> int:
        """Return an upper bound, in bytes, for `sequences` sequences of `context` tokens in one step."""
        spec, rows = self.spec, self.rows
        keys = context + PAGE + (rows if self.quantized else 0)
        pair = (spec.key_dim + spec.value_dim) * self.size
        joined = min(pair * spec.kv_heads * keys * sequences, max(JOINED_BYTES, pair * keys))
        copied = joined * _UNSEALED * mx.float32.size // self.size if self.quantized else joined * _COPIES
        masks = rows * keys if self.quantized else 0
        return copied + masks + self._score_bytes(keys)

    def _score_bytes(self, keys: int) -> int:
        """Return the bytes of scores, and of a mask with at most one byte per score."""
        if is_fused(self.spec, self.rows, softcap=self.softcap):
            return 0
        heads = max(self.spec.query_heads, self.spec.kv_heads)
        scores = min(heads * self.rows * keys, max(MOST_SCORES, heads // self.spec.kv_heads * keys))
        return scores * (_SCORE_COPIES * (mx.float32.size if self.softcap else self.size) + 1)
