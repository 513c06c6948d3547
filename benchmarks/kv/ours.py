"""This project's cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mlxinfer import LLM, SamplingParams
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.engine.core.events import Logits
from mlxinfer.engine.core.sequence import Sequence

from ..loss import Rows

SCALE_BITS = 32 / 64


def logits(model: Path, ids: list[int], *, kv: str, first16: bool = False) -> Iterator[Rows]:
    """Logits of all tokens in order, some rows at a time."""
    with LLM(str(model), kv=kv, kv_first16=first16, max_context=len(ids) + 64) as llm:
        llm.engine.add(Sequence(ids, SamplingParams(), seed=0, max_length=len(ids), wants_logits=True))
        while not llm.engine.idle:
            for event in llm.engine.step():
                if isinstance(event, Logits):
                    yield np.array(event.rows)


def bits_per_value(kv: str) -> float:
    """Bits per cached value including scales, for head sizes that are multiples of 64."""
    chosen = KVFormat.parse(kv)
    kept = [bits + (SCALE_BITS if bits < 16 else 0) for bits in (chosen.k_bits, chosen.v_bits)]
    return sum(kept) / 2
