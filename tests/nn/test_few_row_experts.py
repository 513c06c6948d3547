"""Experts on a GPU: two kernels for few rows where their trial favours them; here in the emulator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.kernels.emulated import counting, needs_emulator
from support.models.plain_weights import pack

from mlxinfer.kernels_metal import kernel_trial
from mlxinfer.kernels_metal.experts import trial
from mlxinfer.kernels_metal.experts.trial import FEW
from mlxinfer.kernels_metal.kernel_trial import SWITCH, Speed
from mlxinfer.nn import few_row_experts, moe, packing
from mlxinfer.nn.activations import clamped_swiglu, elementwise, gated
from mlxinfer.nn.linear import JoinedLinear, Linear
from mlxinfer.nn.moe import SORT_FROM, ExpertLinear, Experts, MixtureOfExperts, PlainExperts, SharedExpert
from mlxinfer.nn.routes import softmax_then_top
from mlxinfer.nn.weights import Dense, Format, Matrix

F32, COUNT, HIDDEN, INNER, CHOSEN = mx.float32, 6, 64, 96, 3
KERNELS = ("in", "out")


@pytest.fixture
def speeds() -> dict[int, Speed]:
    """Speeds that the trial finds."""
    return {1: Speed(1.2), FEW: Speed(1.3)}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, speeds: dict[int, Speed]) -> Iterator[Counter[str]]:
    """Simulates a Mac, and counts launches of both kernels."""
    counts: Counter[str] = Counter()

    monkeypatch.delenv(SWITCH, raising=False)
    for module in (few_row_experts, packing):
        monkeypatch.setattr(module, "is_gpu", lambda: True)
    monkeypatch.setattr(packing, "try_format", lambda *_, **__: None)
    monkeypatch.setattr(kernel_trial, "has_gpu_kernels", lambda: True)
    monkeypatch.setattr(few_row_experts.TRIAL, "verdicts", {})
    monkeypatch.setattr(trial, "speeds", lambda subject: speeds)
    monkeypatch.setattr(trial, "wrong_experts", lambda subject: None)
    with counting(counts, lambda name, launch: None if name == "router" else name.rpartition("_")[2]):
        yield counts


def random(*shape: int, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)) * 0.3


def linear(out: int, in_dims: int, seed: int, form: Format | None = None, biased: bool = False) -> ExpertLinear:
    weight = random(COUNT, out, in_dims, seed=seed)
    matrix: Matrix = Dense(weight) if form is None else pack(weight, form)
    return ExpertLinear(matrix, random(COUNT, out, seed=seed + 10) if biased else None)


FORM = Format(4, 32)


def experts(form: Format | None = FORM, other: Format | None = FORM, gate: Any = None, biased: bool = False) -> Experts:
    parts = [linear(INNER, HIDDEN, seed, form, biased) for seed in (1, 2)]
    return Experts(JoinedLinear(parts, [INNER, INNER]), linear(HIDDEN, INNER, 3, other, biased), gate or gated("silu"))


def mixture(of: Experts | PlainExperts, **more: Any) -> MixtureOfExperts:
    router = Linear(Dense(random(COUNT, HIDDEN, seed=8)))
    return MixtureOfExperts(router, softmax_then_top(CHOSEN, normalized=True), of, **more)


def settled(layer: MixtureOfExperts) -> MixtureOfExperts:
    packing.settle(layer, dtype=F32)
    return layer


def check(layer: MixtureOfExperts, rows: int) -> None:
    """The results are those of plain MLX."""
    x = random(rows, HIDDEN, seed=rows)
    found = layer(x)
    chosen, shares = layer.route(layer.router(x))
    expected = (layer.experts(x, chosen) * shares[..., None]).sum(axis=-2)
    expected = expected if layer.shared is None else expected + layer.shared(x)
    np.testing.assert_allclose(found, expected, atol=2e-4, rtol=1e-4)


def rows_with_kernels(layer: MixtureOfExperts, launches: Counter[str]) -> list[int]:
    found = []
    for rows in (1, 2, 5, SORT_FROM):
        launches.clear()
        check(layer, rows)
        assert {*launches.values()} <= {1}
        if set(launches) == set(KERNELS):
            found.append(rows)
    return found


@needs_emulator
@pytest.mark.parametrize(
    "of",
    [
        experts(),
        experts(Format(5, 32), Format(8, 32), gated("gelu_pytorch_tanh")),
        experts(Format(4, 32, "mxfp4"), Format(4, 32, "mxfp4"), clamped_swiglu(1.702, 7.0), biased=True),
        experts(None, FORM),
        PlainExperts(linear(INNER, HIDDEN, 1, FORM), linear(HIDDEN, INNER, 2, FORM), elementwise("relu2")),
    ],
    ids=["affine", "mixed", "gpt-oss", "dense", "plain"],
)
def test_few_rows_take_two_launches(launches: Counter[str], of: Experts | PlainExperts) -> None:
    assert rows_with_kernels(mixture(of), launches) == []
    assert rows_with_kernels(settled(mixture(of)), launches) == [1, 2, 5]


@needs_emulator
def test_a_matrix_that_sorted_products_would_not_share_is_left_to_the_kernels(
    launches: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX reads a matrix once for several rows from four rows per expert on."""
    monkeypatch.setattr("mlxinfer.nn.moe.SORT_FROM", 12)
    layer = settled(mixture(experts()))
    for rows, used in ((7, True), (8, False)):  # 21 and 24 pairs of 6 experts
        launches.clear()
        check(layer, rows)
        assert bool(launches) == used


@needs_emulator
@pytest.mark.parametrize("speeds", [{1: Speed(1.2), FEW: Speed(0.9)}])
def test_only_what_is_faster_is_used(launches: Counter[str]) -> None:
    assert rows_with_kernels(settled(mixture(experts())), launches) == [1]
    (line,) = few_row_experts.TRIAL.described()
    assert line == (
        "experts of few rows, 3 a row, 4-bit in groups of 32, float32: this project's kernels; next to plain MLX 1.2x at 1 rows"
    )


@needs_emulator
@pytest.mark.parametrize("speeds", [{1: Speed(0.8), FEW: Speed(0.9)}])
def test_without_an_advantage_plain_mlx_is_used_silently(launches: Counter[str]) -> None:
    assert rows_with_kernels(settled(mixture(experts())), launches) == []
    assert few_row_experts.TRIAL.lost() == []


@needs_emulator
def test_after_a_failure_plain_mlx_is_used(launches: Counter[str]) -> None:
    layer = settled(mixture(experts()))
    assert rows_with_kernels(layer, launches) == [1, 2, 5]
    assert few_row_experts.TRIAL.disable(RuntimeError("[METAL] failed"), guilty=False)
    assert rows_with_kernels(layer, launches) == []
    (line,) = few_row_experts.TRIAL.lost()
    assert line.endswith("plain MLX, as a Metal kernel failed: [METAL] failed")


@needs_emulator
@pytest.mark.parametrize(
    "of",
    [
        experts(gate=gated("relu")),
        experts(gate=clamped_swiglu(1.70212, 7.0)),
        experts(Format(8, 32, "mxfp8")),
        PlainExperts(linear(INNER, HIDDEN, 1), linear(HIDDEN, INNER, 2), elementwise("gelu")),
    ],
    ids=["activation", "numbers of gpt-oss", "format", "plain activation"],
)
def test_others_are_computed_by_mlx(launches: Counter[str], of: Experts | PlainExperts) -> None:
    assert rows_with_kernels(settled(mixture(of)), launches) == []
    assert few_row_experts.TRIAL.described() == []


@needs_emulator
def test_gates_and_ups_in_different_formats_are_computed_by_mlx(launches: Counter[str]) -> None:
    parts = [linear(INNER, HIDDEN, 1, FORM), linear(INNER, HIDDEN, 2, Format(8, 32))]
    of = Experts(JoinedLinear(parts, [INNER, INNER]), linear(HIDDEN, INNER, 3, FORM), gated("silu"))
    assert rows_with_kernels(settled(mixture(of)), launches) == []


@needs_emulator
def test_a_recording_matrix_sees_its_rows(launches: Counter[str]) -> None:
    """As calibration watches what a matrix is multiplied with."""

    class Watched(Dense):
        __slots__ = ()

    of = experts(None, None)
    of.down.matrix = Watched(random(COUNT, HIDDEN, INNER, seed=3))
    assert rows_with_kernels(settled(mixture(of)), launches) == []


@needs_emulator
def test_the_result_of_a_shared_expert_is_added_in_the_last_launch(launches: Counter[str]) -> None:
    layer = settled(mixture(experts(), shared=SharedExpert(lambda x: 3 * x)))
    assert rows_with_kernels(layer, launches) == [1, 2, 5]
    assert next(iter(few_row_experts.TRIAL.verdicts))[0].added


@needs_emulator
@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_shared_expert_may_have_a_gate(launches: Counter[str], on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Linear(Dense(random(1, HIDDEN, seed=11)))
    layer = settled(mixture(experts(), shared=SharedExpert(lambda x: 3 * x, gate)))
    monkeypatch.setattr(moe, "is_gpu", lambda: on_gpu)
    x = random(2, HIDDEN, seed=4)
    chosen, shares = layer.route(layer.router(x))
    expected = (layer.experts(x, chosen) * shares[..., None]).sum(axis=-2) + 3 * x / (1 + mx.exp(-gate(x)))
    np.testing.assert_allclose(layer(x), expected, atol=2e-4, rtol=1e-4)
    assert launches == {"in": 1, "out": 1}


@needs_emulator
def test_a_shared_expert_behind_a_projection_is_added_apart(launches: Counter[str]) -> None:
    wide = Linear(Dense(random(HIDDEN, HIDDEN, seed=9)))
    layer = settled(mixture(experts(), shared=SharedExpert(lambda x: 3 * x), widening=wide))
    x = random(2, HIDDEN, seed=4)
    chosen, shares = layer.route(layer.router(x))
    expected = wide((layer.experts(x, chosen) * shares[..., None]).sum(axis=-2)) + 3 * x
    launches.clear()
    np.testing.assert_allclose(layer(x), expected, atol=2e-4, rtol=1e-4)
    assert launches == {"in": 1, "out": 1}


@needs_emulator
def test_matrices_with_gaps_are_laid_out_once(launches: Counter[str]) -> None:
    """A kernel would copy them in every step."""
    of = experts(None, None)
    of.down.matrix = Dense(random(COUNT, INNER, HIDDEN, seed=3).swapaxes(1, 2))
    layer = settled(mixture(of))
    assert isinstance(layer.experts.down.matrix, Dense)
    assert memoryview(layer.experts.down.matrix.weight).c_contiguous
    assert rows_with_kernels(layer, launches) == [1, 2, 5]


def test_without_a_gpu_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_row_experts.TRIAL, "verdicts", {})
    for rows in (1, 5):
        check(mixture(experts()), rows)
    assert few_row_experts.TRIAL.described() == []
