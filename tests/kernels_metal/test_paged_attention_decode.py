"""Decode attention in the emulator against float64: every format, head size and number of heads, every kind of sequence."""

from __future__ import annotations

import itertools
import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.kernels_metal.paged_attention.reference import attention_over_pages
from tests.support.decode_scenes import Scene, largest
from tests.support.emulated import emulated, needs_emulator
from tests.support.pairwise import pairwise
from tests.support.sealed_pages import to_float

BITS = (16, 8, 6, 5, 4, 3, 2)
PASTS = (0, 1, 63, 64, 65, 301, 4096)
ROUNDING = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}
"""Half the distance of two numbers, in units of the larger one: what storing the exact answer may cost."""

AXES: dict[str, tuple[Any, ...]] = {
    "k_bits": BITS,
    "v_bits": BITS,
    "rows": (1, 2, 3, 4, 5, 6, 7, 8),
    "dim": (64, 80, 96, 128, 256, 512),
    "heads": (1, 3, 4, 8, 16),
    "dtype": (mx.float32, mx.float16, mx.bfloat16),
    "past": PASTS,
    "window": (None, 1, 70, 1000),
    "batch": (1, 3, 8),
    "extras": ("", "sinks", "softcap", "first", "sinks softcap first"),
    "value_dim": ("same", "other"),
}


def scene(choice: dict[str, Any], seed: int) -> Scene:
    """The first sequence has the wanted past, as many of the wanted rows as fit into its page, and others keep it company."""
    chance = random.Random(seed)
    extras = str(choice["extras"])
    sequences = [(choice["rows"], choice["past"])]
    sequences += [(chance.randint(1, choice["rows"]), chance.choice(PASTS[:-1])) for _ in range(choice["batch"] - 1)]
    fitting = [(min(rows, 64 - past % 64), past) for rows, past in sequences]
    return Scene(
        tuple((rows, past + rows) for rows, past in fitting),
        k_bits=choice["k_bits"],
        v_bits=choice["v_bits"],
        dim=choice["dim"],
        value_dim=choice["dim"] if choice["value_dim"] == "same" else 128 if choice["dim"] != 128 else 64,
        heads=choice["heads"],
        kv_heads=1 if choice["past"] > 1000 else 2,
        dtype=choice["dtype"],
        window=choice["window"],
        softcap=5.0 if "softcap" in extras else None,
        sinks="sinks" in extras,
        first="first" in extras,
        cores=chance.choice((1, 4, 40)),
        seed=seed,
    )


def check(s: Scene) -> None:
    """Not further from the truth than MLX's attention to the same keys and values, rounded to the same dtype."""
    with emulated():
        answer = to_float(s.run())
    expected = s.expected()
    allowed = max(largest(s.stock() - expected), ROUNDING[s.dtype] * largest(expected))
    assert largest(answer - expected) <= allowed


@needs_emulator
@pytest.mark.parametrize("index, choice", list(enumerate(pairwise(AXES))))
def test_pairs_of_all_choices(index: int, choice: dict[str, Any]) -> None:
    check(scene(choice, index))
