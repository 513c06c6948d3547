"""Decode attention in the emulator against float64: every format, head size and number of heads, every kind of sequence."""

from __future__ import annotations

import itertools
import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.kernels_metal.paged_attention.launcher import paged_attention_decode
from mlxinfer.kernels_metal.paged_attention.plan import plan_decode
from mlxinfer.kernels_metal.paged_attention.reference import attention_over_pages
from tests.support.kernels.emulated import emulated, needs_emulator
from tests.support.oracles.decode_scenes import Scene, largest
from tests.support.oracles.sealed_pages import Array, to_float
from tests.support.processes.pairwise import pairwise

BITS = (16, 8, 6, 5, 4, 3, 2)
PASTS = (0, 1, 63, 64, 65, 301, 4096)
ROUNDING = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}
"""Relative error of storing the exact answer: half the distance of two numbers, in units of the larger one."""

AXES: dict[str, tuple[Any, ...]] = {
    "k_bits": BITS,
    "v_bits": BITS,
    "rows": (1, 2, 3, 5, 8),  # at most; further sequences have fewer
    "dim": (64, 80, 96, 128, 256, 512),
    "heads": (1, 3, 4, 8, 16),
    "dtype": (mx.float32, mx.float16, mx.bfloat16),
    "past": PASTS,
    "window": (None, 1, 70, 1000),
    "batch": (1, 3, 8),
    "extras": ("", "sinks", "softcap", "first", "sinks softcap first"),
    "value_dim": ("same", "same", "other"),
    "apart": (0, 1, 5, 16),  # rows of the open page, at most
}


def scene(choice: dict[str, Any], seed: int) -> Scene:
    """Make a scene whose first sequence has the wanted past and as many of the wanted rows as fit into its page. Others accompany it."""
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
        apart=choice["apart"],
        seed=seed,
    )


def check(s: Scene) -> None:
    """Not further from the truth than MLX's attention to the same keys and values, rounded to the same dtype: by root mean square, and
    but for chance by the largest error too."""
    with emulated():
        answer = to_float(s.run())
    expected = s.expected()
    error, stock = answer - expected, s.stock() - expected
    for size, chance in ((root_mean_square, 1.0), (largest, 1.25)):
        assert size(error) <= chance * max(size(stock), ROUNDING[s.dtype] * size(expected))


def root_mean_square(x: Array) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def late(index: int) -> list[pytest.MarkDecorator]:
    """The first combinations meet most pairs, and all choices; each is a kernel to compile."""
    return [pytest.mark.slow] if index >= 30 else [pytest.mark.long] if index >= 15 else []


COMBINATIONS = pairwise(AXES)


def test_the_first_combinations_have_all_choices() -> None:
    first = COMBINATIONS[:30]
    assert all({choice[name] for choice in first} == set(values) for name, values in AXES.items())


@needs_emulator
@pytest.mark.parametrize(
    ("index", "choice"),
    [pytest.param(index, choice, marks=late(index)) for index, choice in enumerate(COMBINATIONS)],
)
def test_pairs_of_all_choices(index: int, choice: dict[str, Any]) -> None:
    check(scene(choice, index))


@needs_emulator
@pytest.mark.slow
@pytest.mark.parametrize(("k_bits", "v_bits"), list(itertools.product(BITS, BITS)))
def test_every_format_with_every_head(k_bits: int, v_bits: int) -> None:
    """Head sizes and numbers of heads in full; everything else in turn."""
    chance = random.Random(k_bits * 16 + v_bits)
    for seed, (dim, heads) in enumerate(itertools.product(AXES["dim"], AXES["heads"])):
        choice = {name: chance.choice(values) for name, values in AXES.items()}
        check(scene({**choice, "k_bits": k_bits, "v_bits": v_bits, "dim": dim, "heads": heads}, seed))


@needs_emulator
@pytest.mark.slow
@pytest.mark.parametrize(("rows", "heads"), list(itertools.product(range(1, 9), AXES["heads"])))
def test_every_length_with_every_number_of_queries(rows: int, heads: int) -> None:
    chance = random.Random(rows * 32 + heads)
    for seed, (past, window) in enumerate(itertools.product(AXES["past"], AXES["window"])):
        choice = {name: chance.choice(values) for name, values in AXES.items()}
        check(scene({**choice, "rows": rows, "heads": heads, "past": past, "window": window, "dim": 64, "value_dim": "same"}, seed))


@needs_emulator
@pytest.mark.parametrize(
    "dim", [pytest.param(d, marks=pytest.mark.long if d in (40, 192) else pytest.mark.slow) for d in (16, 40, 72, 112, 192)]
)
def test_other_head_sizes(dim: int) -> None:
    check(Scene(((2, 200), (1, 131)), k_bits=5, v_bits=3, dim=dim, heads=2, dtype=mx.float16))


@needs_emulator
def test_a_channel_of_large_keys() -> None:
    """Keys far from zero, as biases of K projections make them: scores are differences of large numbers."""
    check(Scene(((1, 700),), dim=64, heads=4, dtype=mx.bfloat16, spread=30.0))


@needs_emulator
def test_sinks_count_once_however_many_parts_there_are() -> None:
    answers = []
    for cores, items in ((1, 5), (1000, 17)):
        s = Scene(((2, 4000), (1, 100)), dim=64, heads=2, sinks=True, cores=cores)
        assert s.plan.items == items
        with emulated():
            answers.append(to_float(s.run()))
    assert largest(answers[0] - answers[1]) < 1e-6


@needs_emulator
@pytest.mark.parametrize("heads", [1, 12])
def test_a_row_does_not_depend_on_its_company(heads: int) -> None:
    """Bit for bit, as long as no sequence is cut: batch and order are only addresses."""
    s = Scene(((1, 300), (1, 70), (1, 200)), dim=64, heads=heads, dtype=mx.float16)
    with emulated():
        together = to_float(s.run())
        for i in range(3):
            alone = plan_decode(s.shape, [s.rows[i]], s.pools, query_rows=3)
            answer = paged_attention_decode(s.q, *s.arrays, alone, scale=s.scale)
            assert np.array_equal(to_float(answer)[0], together[i])


@pytest.mark.parametrize("bits", BITS)
def test_the_plain_reference(bits: int) -> None:
    """In plain MLX, from the same arrays."""
    s = Scene(
        ((2, 300), (1, 64), (3, 131)), k_bits=bits, v_bits=bits, dim=80, heads=2, window=100, sinks=True, softcap=5.0, first=True, apart=4
    )
    answer = attention_over_pages(s.q, *s.arrays, s.plan, scale=s.scale, recent=s.recent, softcap=s.softcap, sinks=s.sink_logits)
    assert largest(to_float(answer) - s.expected()) < 2e-6
