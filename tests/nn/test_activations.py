"""Activations by name, compared with mlx.nn and the papers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxinfer.errors import UnsupportedModelError
from mlxinfer.nn import activations
from mlxinfer.nn.activations import clamped_swiglu, gated

X, UP = mx.linspace(-6, 6, 49), mx.linspace(2, -3, 49)
EXPECTED = {
    "silu": nn.silu,
    "swish": nn.silu,
    "gelu": nn.gelu,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "gelu_new": nn.gelu_approx,
    "gelu_fast": nn.gelu_approx,
    "quick_gelu": nn.gelu_fast_approx,
    "relu": nn.relu,
    "relu2": nn.relu2,
    "sigmoid": mx.sigmoid,
    "tanh": mx.tanh,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_gate_is_the_activation_times_up(name: str) -> None:
    np.testing.assert_allclose(gated(name)(X, UP), EXPECTED[name](X) * UP, atol=2e-5)


@pytest.fixture
def compiling() -> Iterator[None]:
    """MLX fuses, as it does for users."""
    mx.enable_compile()
    yield
    if not mx.metal.is_available():
        mx.disable_compile()


@pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++, without which MLX fuses nothing on a CPU")
@pytest.mark.parametrize(("rows", "kernels"), [(1, 1), (16, 1), (17, 2)])
def test_the_gated_tanh_gelu_of_few_rows_is_one_kernel(
    rows: int, kernels: int, compiling: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(activations, "is_gpu", lambda: True)
    gate, up = (mx.random.normal((rows, 24), key=mx.random.key(seed)) for seed in (1, 2))
    mx.eval(gate, up)
    y = gated("gelu_pytorch_tanh")(gate, up)
    mx.export_to_dot(str(tmp_path / "graph"), y)
    assert (tmp_path / "graph").read_text().count("label") == kernels
    np.testing.assert_allclose(y, nn.gelu_approx(gate) * up, atol=2e-5)


def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match="'swoosh'"):
        gated("swoosh")


def test_the_clamped_gate() -> None:
    y = clamped_swiglu(1.5, 2.0)(mx.array([3.0, -3.0, 1.0]), mx.array([5.0, -5.0, 0.5]))
    g, u = np.array([2.0, -3.0, 1.0]), np.array([2.0, -2.0, 0.5])
    np.testing.assert_allclose(y, g / (1 + np.exp(-1.5 * g)) * (u + 1), rtol=1e-5)
