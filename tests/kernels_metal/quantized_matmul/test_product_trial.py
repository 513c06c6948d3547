"""The trial of the product kernels, in the emulator: right ones pass it in every format, and all variants are timed."""

from __future__ import annotations

import mlx.core as mx
import pytest
from support.kernels.emulated import emulated, needs_emulator

from mlxinfer.kernels_metal.quantized_matmul.block_formats import BLOCKS
from mlxinfer.kernels_metal.quantized_matmul.launcher import ROWS
from mlxinfer.kernels_metal.quantized_matmul.trial import Subject, is_supported, speeds, wrong_products

BF16, F16 = mx.bfloat16, mx.float16
SUBJECTS = [
    Subject("affine", 4, 64, BF16),
    Subject("affine", 8, 32, F16),
    Subject("affine", 3, 128, BF16),
    Subject("mxfp4", 4, 32, BF16),
    *(Subject(kind, form.bits, form.group, F16 if kind[-1] == "0" else BF16) for kind, form in BLOCKS.items()),
]


@needs_emulator
@pytest.mark.parametrize("subject", [SUBJECTS[0], SUBJECTS[-1]], ids=lambda subject: subject.name)
def test_right_kernels_pass(subject: Subject) -> None:
    with emulated():
        assert wrong_products(subject) is None


@needs_emulator
@pytest.mark.slow
@pytest.mark.parametrize("subject", SUBJECTS[1:-1], ids=lambda subject: subject.name)
def test_right_kernels_pass_in_the_other_formats(subject: Subject) -> None:
    assert is_supported(subject)
    with emulated():
        assert wrong_products(subject) is None


@needs_emulator
@pytest.mark.parametrize("subject", [SUBJECTS[0], SUBJECTS[3], SUBJECTS[-1]], ids=lambda subject: subject.name)
def test_every_variant_is_timed(subject: Subject) -> None:
    with emulated():
        found = speeds(subject, 0.001, width=256, most_bytes=1 << 16)
    assert tuple(found) == (ROWS if subject.mode in BLOCKS else ROWS[1:])
    assert all(speed.times_mlx > 0 and speed.seconds > 0 for speed in found.values())


@pytest.mark.parametrize("subject", [Subject("mxfp8", 8, 32, BF16), Subject("nvfp4", 4, 16, BF16), Subject("affine", 4, 16, BF16)])
def test_formats_without_a_kernel(subject: Subject) -> None:
    assert not is_supported(subject)
