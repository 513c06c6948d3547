"""The benchmark of products on a GPU, without a GPU."""

from __future__ import annotations

import mlx.core as mx
import pytest
from click import ClickException
from click.testing import CliRunner

from benchmarks.__main__ import main
from benchmarks.kernels.products_gpu import SUBJECTS, measure
from mlxinfer.kernels_metal.quantized_matmul import trial


@pytest.mark.skipif(mx.metal.is_available() or mx.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = CliRunner().invoke(main, ["products-gpu"])
    assert done.exit_code == 1
    assert "a product on a GPU needs an Apple GPU" in done.output


def test_a_wrong_kernel_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "wrong_products", lambda subject: "products of 2 rows differ")
    with pytest.raises(ClickException, match="affine 4/64 bfloat16 wide: the kernel failed"):
        list(measure())


def test_bytes_are_those_of_the_formats() -> None:
    bits = {subject.name: subject.nbytes(1 << 20) * 8 / (1 << 20) for subject in SUBJECTS}
    expected = {
        "affine 4/64 bfloat16": 4.5,
        "affine 4/32 float16": 5.0,
        "mxfp4 4/32 bfloat16": 4.25,
        "Q4_K bfloat16": 4.5,
        "Q6_K bfloat16": 6.5625,
    }
    assert {name: bits[name] for name in expected} == expected
