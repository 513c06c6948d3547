"""Dequantizing pages in the emulator: bit for bit as plain MLX, under sanitizers and in every order of threads."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.kernels_metal import emulator
from mlxinfer.kernels_metal.unseal_pages.launcher import FILLED, SEALED, plan_unseal, unseal_pages
from tests.support.kernels.emulated import emulated, needs_emulator
from tests.support.oracles.prefill_scenes import PrefillScene
from tests.support.oracles.sealed_pages import to_float

SCENES = {
    "4 and 3 bits": PrefillScene(((200, 130),), 4, 3, 64, dtype=mx.bfloat16, first16=True),
    "16 and 5 bits": PrefillScene(((70, 200),), 16, 5, 80, 96, kv_heads=1, dtype=mx.float16),
    "6 and 16 bits": PrefillScene(((64, 64),), 6, 16, 128, 64, kv_heads=3, dtype=mx.bfloat16),
    "2 and 8 bits": PrefillScene(((130, 70),), 2, 8, 256, dtype=mx.float32),
}
pytestmark = needs_emulator


@pytest.mark.parametrize("name", SCENES)
def test_values_are_those_of_plain_mlx_to_the_bit(name: str) -> None:
    expected = [to_float(x) for x in SCENES[name].unsealed()]
    other = ("tsan", "random") if name in ("4 and 3 bits", "6 and 16 bits") else ("msan", "forward")
    for mode, order in (("fast", "forward"), ("fast", "reversed"), ("asan", "random"), other):
        with emulated(mode=mode, order=order, seed=1):
            for got, want in zip(SCENES[name].unseal(), expected, strict=True):
                assert np.array_equal(to_float(got), want, equal_nan=True), (mode, order)


@pytest.mark.parametrize("name", SCENES)
def test_every_byte_is_loaded_once_and_stored_once(name: str) -> None:
    s = SCENES[name]
    with emulated(), emulator.count_bytes() as counts:
        keys, values = s.unseal()
    count = counts.of("unseal_pages")
    for output, array in (("keys", keys), ("values", values)):
        assert (count[output].stored, count[output].most_stores) == (array.nbytes, 1)
    sealed, _, first, raw, _, _ = s.unseal_operands
    assert count["sealed_keys"].loaded == sealed[0].nbytes
    assert count["raw_keys"].loaded + count["raw_values"].loaded == sum(a.nbytes for a in raw)
    assert count["first_keys"].loaded == (first[0].nbytes if first else 0)
    for buffer in ("sealed_keys", "sealed_values", "filled_keys", "filled_values", "raw_keys", "raw_values"):
        assert count[buffer].most_loads <= 1, buffer


def test_pages_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="page 3 of kind 0"):
        plan_unseal([(SEALED, 3)], (3, 0, 0, 0))
    with pytest.raises(ValueError, match="page 0 of kind 1"):
        plan_unseal([(FILLED, 0)], (3, 0, 0, 0))
    sealed, filled, first, raw, plan, shape = SCENES["4 and 3 bits"].unseal_operands
    for change, message in [
        ((sealed[:3], filled, first, raw), "sealed pages are"),
        ((sealed, filled[:2], first, raw), "became full are"),
        ((sealed, filled, [], raw), "first pages are none"),
        ((sealed, filled, first, raw[::-1][:1]), "raw pages are"),
    ]:
        with pytest.raises(ValueError, match=message):
            unseal_pages(*change, plan, shape)
