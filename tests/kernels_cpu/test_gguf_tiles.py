"""Products with K-quants for many rows at once: what rounding activations explains, gates, experts, and odd numbers of panels."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from test_gguf import numbers, pack, random_blocks

from mlxinfer import kernels_cpu

pytestmark = pytest.mark.skipif(not kernels_cpu.in_use(), reason=kernels_cpu.status())

KINDS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
LIMITS = {"int16": 127 * 256 + 127, "int8": 127}
"""The integer that the largest of 256 activations becomes."""


@pytest.mark.parametrize("precision", LIMITS)
@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_that_of_256_columns(kind: str, precision: str) -> None:
    """Columns that are a thousand times larger than the others cost those of their 256 precision, and no other ones."""
    rng = np.random.default_rng(1)
    rows = random_blocks(kind, (33, 3), 2)
    exact = numbers(kind, rows).astype(np.float64)
    x = rng.standard_normal((20, 768)).astype(np.float32)
    x[:, 300] *= 1000
    got = np.array(pack(kind, (33, 3), rows, precision).multiply(mx.array(x)))
    blocks, weights = np.abs(x).reshape(20, 3, 256).max(axis=2), np.abs(exact).reshape(33, 3, 256)
    rounding = blocks * 0.505 / LIMITS[precision] @ weights.sum(axis=2).T
    # Codes are larger than the numbers, by their bias: sums of both are what float32 rounds.
    sizes = np.abs(x) @ np.broadcast_to(weights.max(axis=(1, 2)) * 4, (768, 33)) * 2**-22
    assert (np.abs(got - x @ exact.T) <= rounding + sizes).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("panels", [1, 2, 3])
def test_gates_of_many_rows(kind: str, panels: int) -> None:
    n = 2 * 16 * panels
    packed = pack(kind, (n, 2), random_blocks(kind, (n, 2), 3), "int16")
    x = mx.array(np.random.default_rng(4).standard_normal((37, 512)).astype(np.float32)) * 0.1
    gated = np.array(packed.multiply(x, gate="silu"))
    both = np.array(packed.multiply(x), np.float64)
    gate, up = both[:, : n // 2], both[:, n // 2 :]
    np.testing.assert_allclose(gated, gate / (1 + np.exp(-gate)) * up, rtol=1e-4, atol=1e-6)
    alone = np.concatenate([np.array(packed.multiply(x[i : i + 1], gate="silu")) for i in range(37)])
    np.testing.assert_array_equal(gated, alone)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_with_tiles_of_their_own(kind: str) -> None:
    experts = pack(kind, (3, 40, 1), random_blocks(kind, (3, 40, 1), 5), "int16")
    rng = np.random.default_rng(6)
    x = mx.array(rng.standard_normal((70, 256)).astype(np.float32))
    chosen = rng.permutation(np.repeat([0, 1, 2], (36, 17, 17)))
    together = np.array(experts.multiply(x, experts=mx.array(chosen)))
    alone = [np.array(experts.multiply(x[i : i + 1], experts=mx.array(chosen[i : i + 1]))) for i in range(70)]
    np.testing.assert_array_equal(together, np.concatenate(alone))
