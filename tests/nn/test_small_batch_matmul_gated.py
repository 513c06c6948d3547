"""Gated layers on a GPU: one kernel for product and gate if its trial favours it; here in the emulator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import mlx.core as mx
import pytest
from support.kernels.emulated import counting, needs_emulator

from mlxinfer.kernels_metal import kernel_trial
from mlxinfer.kernels_metal.kernel_trial import Speed
from mlxinfer.kernels_metal.quantized_matmul import trial
from mlxinfer.kernels_metal.quantized_matmul.trial import Subject
from mlxinfer.nn import activations, packing, small_batch_matmul
from mlxinfer.nn.activations import gated
from mlxinfer.nn.linear import JoinedLinear, Linear
from mlxinfer.nn.mlp import GatedMLP
from mlxinfer.nn.weights import Format, Quantized

F32, HIDDEN, INNER = mx.float32, 128, 24
FORM = Format(4, 64)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[int]]:
    """Simulates a Mac whose kernels are faster, and counts launches by the gates of their templates."""
    counts: Counter[int] = Counter()

    for module in (small_batch_matmul, packing):
        monkeypatch.setattr(module, "is_gpu", lambda: True)
    monkeypatch.setattr(kernel_trial, "has_gpu_kernels", lambda: True)
    monkeypatch.setattr(small_batch_matmul.TRIAL, "verdicts", {})
    monkeypatch.setattr(trial, "speeds", lambda subject, seconds: {rows: Speed(0.9 if rows == 4 else 1.2) for rows in subject.rows})
    monkeypatch.setattr(trial, "wrong_products", lambda subject: None)
    with counting(counts, lambda name, launch: dict(launch["template"])["GATE"]):
        yield counts


def matrix(n: int, k: int, seed: int) -> Quantized:
    weight = mx.random.normal((n, k), key=mx.random.key(seed)) * 0.1
    return Quantized(*mx.quantize(weight, group_size=64, bits=4), FORM)


def layer(activation: str = "silu", bias: bool = False) -> GatedMLP:
    biases = mx.ones((INNER,)) if bias else None
    parts = [Linear(matrix(INNER, HIDDEN, seed), biases) for seed in (1, 2)]
    return GatedMLP(JoinedLinear(parts, [INNER, INNER]), Linear(matrix(HIDDEN, 64, 3)), gated(activation))


def inner(mlp: GatedMLP, count: int) -> mx.array:
    """Compute the gated units for some rows. Asserts that they are right."""
    x = mx.random.normal((count, HIDDEN), key=mx.random.key(count))
    linear = mlp.gate_up.linears[0]
    found = mlp.gate_up.gated(mlp.gate, x)
    assert isinstance(linear.matrix, Quantized)
    y = x @ linear.matrix.dequantize(F32).T
    y = y if linear.bias is None else y + linear.bias
    assert mx.allclose(found, mlp.gate(*mx.split(y, 2, axis=-1)), rtol=1e-3, atol=1e-3).item()
    return found


def counts_with_a_kernel(mlp: GatedMLP, launches: Counter[int]) -> list[int]:
    found = []
    for count in (1, 2, 3, 5, 8, 9):
        before = launches[0], launches.total()
        inner(mlp, count)
        if launches.total() > before[1] and launches[0] == before[0]:
            found.append(count)
    return found


@needs_emulator
def test_a_layer_is_tried_when_it_is_settled(launches: Counter[int]) -> None:
    mlp = layer()
    assert counts_with_a_kernel(mlp, launches) == []
    packing.settle(mlp, dtype=F32)
    assert counts_with_a_kernel(mlp, launches) == [1, 2, 5, 8]  # 3 rows take the variant for 4, which is slower
    assert launches[0] == 1  # product of 9 rows, gate apart
    assert "4-bit affine in groups of 64, float32, gated by silu: this project's kernels" in "\n".join(small_batch_matmul.TRIAL.described())


@needs_emulator
def test_after_a_failure_mlx_gates(launches: Counter[int]) -> None:
    mlp = layer("gelu_pytorch_tanh")
    packing.settle(mlp, dtype=F32)
    assert counts_with_a_kernel(mlp, launches) == [1, 2, 5, 8]
    assert small_batch_matmul.TRIAL.disable(RuntimeError("[METAL] failed"), guilty=False)
    assert counts_with_a_kernel(mlp, launches) == []
    assert any("gated by gelu_tanh" in line for line in small_batch_matmul.TRIAL.lost())


@needs_emulator
@pytest.mark.parametrize("mlp", [layer(bias=True), layer("relu")], ids=["bias", "another activation"])
def test_others_are_gated_by_mlx(launches: Counter[int], mlp: GatedMLP) -> None:
    packing.settle(mlp, dtype=F32)
    assert counts_with_a_kernel(mlp, launches) == []
    assert not any("gated" in line for line in small_batch_matmul.TRIAL.described()) or mlp.gate_up.linears[0].bias is not None


@needs_emulator
def test_only_the_guilty_gate_is_given_up(launches: Counter[int], monkeypatch: pytest.MonkeyPatch) -> None:
    mlp = layer()
    packing.settle(mlp, dtype=F32)

    def only_gated(subject: Subject) -> str | None:
        return "wrong" if subject.gate else None

    monkeypatch.setattr(trial, "wrong_products", only_gated)
    assert small_batch_matmul.TRIAL.disable(ValueError("x"), guilty=True)
    before = launches[0]
    assert counts_with_a_kernel(mlp, launches) == []
    assert launches[0] > before


def test_without_a_gpu_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_batch_matmul.TRIAL, "verdicts", {})
    mlp = layer()
    for count in (1, 2, 9):
        inner(mlp, count)
    assert small_batch_matmul.TRIAL.described() == []
    assert activations.gated("silu").activation == "silu"
