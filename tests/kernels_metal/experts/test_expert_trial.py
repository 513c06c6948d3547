"""The trial of experts, in the emulator: right kernels pass it, wrong ones do not, and both numbers of rows are timed."""

from __future__ import annotations

import itertools
from typing import Any

import mlx.core as mx
import pytest
from support.kernels.emulated import emulated, needs_emulator
from support.oracles.expert_scenes import CLAMPED, GELU, RELU2, SILU

from mlxinfer.kernels_metal import emulator
from mlxinfer.kernels_metal.executors import run_with
from mlxinfer.kernels_metal.experts.launcher import Form, Unit
from mlxinfer.kernels_metal.experts.trial import FEW, Subject, speeds, why_unsupported, wrong_experts

BF16, F16, F32 = mx.bfloat16, mx.float16, mx.float32
FOUR, MXFP4, PLAIN = Form("affine", 4, 64), Form("mxfp4", 4, 32), Form("plain")
SUBJECTS = [
    Subject(FOUR, Form("affine", 6, 64), SILU, BF16, 128, 64, 8, added=True),
    Subject(MXFP4, MXFP4, CLAMPED, BF16, 2880, 2880, 4, biased=True),
    Subject(PLAIN, Form("affine", 8, 128), GELU, F16, 256, 128, 2),
    Subject(Form("affine", 3, 32), PLAIN, RELU2, F32, 64, 32, 6),
]


def named(subject: Subject) -> str:
    return f"{subject.into.mode} {subject.unit.name} {subject.chosen}"


@needs_emulator
@pytest.mark.parametrize("subject", [SUBJECTS[0], SUBJECTS[1], *(pytest.param(s, marks=pytest.mark.long) for s in SUBJECTS[2:])], ids=named)
def test_right_kernels_pass(subject: Subject) -> None:
    assert why_unsupported(subject) is None
    with emulated():
        assert wrong_experts(subject) is None


@needs_emulator
@pytest.mark.parametrize(
    ("name", "fault"), [("affine_experts_in", "the inner of 1 rows differ"), ("affine_experts_out", "the sum of 1 rows")]
)
def test_wrong_kernels_do_not(name: str, fault: str) -> None:
    def broken(**arguments: Any) -> Any:
        kernel = emulator.metal_kernel(**arguments)
        wrong = arguments["name"] == name
        return lambda **launch: [y * 0.9 if wrong else y for y in kernel(**launch)]

    with run_with(broken):
        assert fault in (wrong_experts(SUBJECTS[0]) or "")


@needs_emulator
def test_the_trial_launches_every_variant_that_a_model_reaches() -> None:
    """With fewer than 8 experts of one row, `chosen` and `shares` of one row are in another address space."""
    for subject, spaces in ((SUBJECTS[0], {False}), (SUBJECTS[2], {True, False})):
        found = set()

        def maker(found: set[bool] = found, **arguments: Any) -> Any:
            kernel = emulator.metal_kernel(**arguments)

            def call(*, inputs: Any, **launch: Any) -> Any:
                found.add(inputs[1].size < 8)
                return kernel(inputs=inputs, **launch)

            return call

        with run_with(maker):
            assert wrong_experts(subject) is None
        assert found == spaces


@needs_emulator
@pytest.mark.long
def test_one_row_and_several_are_timed() -> None:
    subject = Subject(FOUR, FOUR, SILU, BF16, 128, 64, 2)
    ticks = itertools.count()
    with emulated():
        found = speeds(subject, 0.001, clock=lambda: float(next(ticks)), most_bytes=1 << 15)
    assert tuple(found) == (1, FEW)
    assert all(speed.times_mlx > 0 and speed.seconds > 0 for speed in found.values())


@pytest.mark.parametrize(
    "subject",
    [
        Subject(Form("nvfp4", 4, 16), FOUR, SILU, BF16, 128, 64, 2),
        Subject(FOUR, Form("affine", 4, 16), SILU, BF16, 128, 64, 2),
        Subject(FOUR, FOUR, Unit("gelu"), BF16, 128, 64, 2),
        Subject(FOUR, FOUR, SILU, BF16, 128, 96, 2),
        Subject(PLAIN, PLAIN, SILU, BF16, 48, 64, 2),
    ],
    ids=range(5),
)
def test_what_has_no_kernel(subject: Subject) -> None:
    assert why_unsupported(subject)
