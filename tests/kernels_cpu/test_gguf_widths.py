"""Products with GGUF blocks at the sizes of models, those that are no whole panels or blocks of 256 among them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from test_gguf import BITS, numbers, pack, random_blocks

from mlxinfer import kernels_cpu

pytestmark = pytest.mark.skipif(not kernels_cpu.in_use(), reason=kernels_cpu.status())

LOSS = {"int16": 4e-5, "int8": 6e-3}
WIDTHS = {32: (896, 4864), 256: (768, 4864)}
"""By the columns of a block."""


def columns_of(kind: str) -> int:
    return GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]


@pytest.mark.parametrize("precision", LOSS)
@pytest.mark.parametrize("kind", BITS)
def test_widths_of_models(kind: str, precision: str) -> None:
    block = columns_of(kind)
    for n, k, count in ((896, WIDTHS[block][0], 16), (40, WIDTHS[block][1], 49), (121, WIDTHS[block][0], 1)):
        rows = random_blocks(kind, (n, k // block), n)
        exact = numbers(kind, rows).astype(np.float64)
        x = np.random.default_rng(k).standard_normal((count, k)).astype(np.float32)
        got = np.array(pack(kind, (n, k // block), rows, precision).multiply(mx.array(x)))
        largest = np.abs(x) @ np.broadcast_to(np.abs(exact).max(axis=1), (k, n))
        assert (np.abs(got - x @ exact.T) / largest).max() < LOSS[precision]


@pytest.mark.parametrize("precision", LOSS)
@pytest.mark.parametrize("kind", BITS)
def test_a_row_is_the_same_alone_and_in_a_tile(kind: str, precision: str) -> None:
    """Whatever the machine multiplies tiles with."""
    packed = pack(kind, (37, 3), random_blocks(kind, (37, 3), 5), precision)
    x = mx.array(np.random.default_rng(6).standard_normal((35, packed.shape[1])).astype(np.float32))
    together = np.array(packed.multiply(x))
    alone = np.concatenate([np.array(packed.multiply(x[i : i + 1])) for i in range(len(x))])
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("kind", BITS)
def test_a_tile_beside_infinities(kind: str) -> None:
    packed = pack(kind, (40, 2), random_blocks(kind, (40, 2), 7), "int16")
    x = np.random.default_rng(8).standard_normal((32, packed.shape[1])).astype(np.float32)
    clean = np.array(packed.multiply(mx.array(x)))
    x[3, 5] = np.inf
    got = np.array(packed.multiply(mx.array(x)))
    others = np.arange(32) != 3
    np.testing.assert_array_equal(got[others], clean[others])
    assert not np.isfinite(got[3]).all()
