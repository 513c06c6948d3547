"""What a conversion costs, measured in the probabilities of the next token."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import mlx.core as mx

from ..cache.base import Segment
from ..cache.paged import PagedCache
from ..device import default_dtype, device_memory, is_gpu
from ..loading.load import open_checkpoint
from ..loading.weights import CheckpointWeights
from ..models import build
from ..nn.packing import settle
from ..tokenizer.tokenizer import Tokenizer
from .report import Quality

TEXT = """\
The harbour was quiet before dawn. A fisherman checked his nets, counted the floats twice, and looked at the sky, which promised \
wind. "If it turns north," he said to his daughter, "we stay." She laughed: he had said so every morning for ten years, and every \
morning they had gone out.

Water boils at 100 degrees Celsius at sea level, but at only 90 degrees on a mountain of 3000 metres, because the pressure of the \
air is lower there. For the same reason, bread needs less yeast and more time in the oven.

def mean(values):
    if not values:
        raise ValueError("mean of nothing")
    return sum(values) / len(values)

1. Preheat the oven to 220 degrees. 2. Mix flour, salt and water. 3. Let the dough rest for an hour, then fold it four times.
"""
LEAST_TOKENS = 32
_MOST_TOKENS = 256
_CPU_FLOPS = 4e10
"""About 20 seconds of MLX on a CPU, for both models together."""


def tokens_to_measure(parameters: int) -> int:
    """How many positions can be compared within seconds and within memory; 0 if too few to be meaningful."""
    bytes_in_memory = parameters * default_dtype().size
    if bytes_in_memory > device_memory().usable / 2:
        return 0
    count = _MOST_TOKENS if is_gpu() else min(_MOST_TOKENS, int(_CPU_FLOPS / (4 * max(parameters, 1))))
    return count if count >= LEAST_TOKENS else 0


def compare(source: Path, converted: Path, tokenizer: Tokenizer, count: int) -> Quality:
    """KL divergence (nats) and top-1 agreement of the two models on the first `count` tokens of a built-in text; one model is in memory at
    a time."""
    ids = tokenizer.encode(TEXT)[:count]
    before, after = _log_probabilities(source, ids), _log_probabilities(converted, ids)
    kl = mx.sum(mx.exp(before) * (before - after), axis=-1)
    same = mx.argmax(before, axis=-1) == mx.argmax(after, axis=-1)
    return Quality(max(_mean(kl), 0.0), _mean(same), len(ids))


def _mean(array: mx.array) -> float:
    return float(mx.mean(array.astype(mx.float32)).item())  # type: ignore[arg-type]


def _log_probabilities(path: Path, ids: list[int]) -> mx.array:
    """float32 `[T, vocab]`, natural logarithms."""
    checkpoint = open_checkpoint(path)
    try:
        dtype = default_dtype()
        weights = CheckpointWeights(checkpoint, dtype)
        model = build(checkpoint.config, weights, ready=partial(settle, precision="float32"))
        weights.finish()
    finally:
        checkpoint.close()
    cache = PagedCache(model.layers, dtype=dtype, kv_cache_tokens=len(ids) + 64, chunk=len(ids))
    step = cache.begin([Segment(cache.open(), 0, len(ids), 0, len(ids))])
    logits = model.logits(model.hidden(mx.array(ids, mx.int32), step))
    result = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(result)
    return result
