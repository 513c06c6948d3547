"""The CUDA twin of products of one row."""

from __future__ import annotations

import re
from collections import Counter

import mlx.core as mx
import pytest
from support.kernels import cuda_cpu
from support.kernels.cuda_compiled import PTX, Compiled, needs_nvrtc
from support.kernels.emulated import needs_emulator
from support.oracles.gated_products import check_gated
from support.oracles.quantized_products import matrix, rows_of_x

from mlxinfer.kernels_metal.executors import run_with

F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16


@needs_emulator
@pytest.mark.parametrize(
    ("kind", "n", "k", "dtype"),
    [
        ("4/64", 11, 2112, BF16),
        ("8/32", 6, 544, F16),
        ("2/128", 7, 4096, F32),
        ("3/32", 5, 96, BF16),
        ("mxfp4", 1030, 64, BF16),
        ("4/128", 42, 128, F16),
    ],
)
def test_one_row_as_translated_is_right(kind: str, n: int, k: int, dtype: mx.Dtype) -> None:
    weights, x = matrix(kind, n, k, dtype), rows_of_x(1, k, dtype)
    with run_with(cuda_cpu.maker):
        weights.check(x, weights.times(x))


@needs_emulator
@pytest.mark.parametrize(("kind", "gate"), [("4/64", "gelu_tanh"), ("mxfp4", "silu")])
def test_gated_as_translated_is_right(kind: str, gate: str) -> None:
    with run_with(cuda_cpu.maker):
        check_gated(kind, 1, 21, 1600, gate, BF16)


@pytest.mark.long
@needs_nvrtc
@pytest.mark.parametrize("kind", ["2/64", "3/32", "4/64", "5/32", "6/128", "8/64", "mxfp4"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_one_row_compiles_and_stays_in_registers(kind: str, dtype: mx.Dtype) -> None:
    compiled = Compiled(PTX)
    with run_with(compiled.maker):
        matrix(kind, 16, 512, dtype).times(rows_of_x(1, 512, dtype))
    assert len(compiled) == 1
    assert "ld.local" not in compiled[0]


def instructions_of_loop(ptx: str) -> Counter[str]:
    """Count the instructions of the longest loop, without moves between registers."""
    lines = [line.strip() for line in ptx.splitlines()]
    labels = {line[:-1]: at for at, line in enumerate(lines) if re.fullmatch(r"\$?[\w$]+:", line)}
    branches = ((labels.get(found[1], len(lines)), at) for at, line in enumerate(lines) if (found := re.search(r"\bbra\S*\s+(\S+);", line)))
    begin, end = max((loop for loop in branches if loop[0] < loop[1]), key=lambda loop: loop[1] - loop[0])
    found = re.findall(r"(?:^|[{;]\s*)(?:@!?%p\d+\s+)?([a-z][a-z0-9_]*(?:\.\w+)*)\s", "\n".join(lines[begin : end + 1]), re.MULTILINE)
    return Counter(name for name in found if not name.startswith("mov"))


@pytest.mark.long
@needs_nvrtc
@pytest.mark.parametrize(("kind", "most"), [("2/64", 4.4), ("4/64", 4.4), ("8/64", 4.9), ("mxfp4", 5.7)])
def test_codes_are_not_converted(kind: str, most: float) -> None:
    """Instructions per number of the matrix are those of the kernel's README, with half an `and`, or with one for mxfp4."""
    compiled = Compiled(PTX)
    with run_with(compiled.maker):
        matrix(kind, 16, 4096, F16).times(rows_of_x(1, 4096, F16))
    found, numbers = instructions_of_loop(compiled[0]), 4 * (16 if kind[0] == "8" else 32)
    assert not any(name.startswith("cvt.rn.f32") for name in found)
    assert found["and.b32"] <= numbers * (1.02 if kind == "mxfp4" else 0.52)
    assert numbers < found["fma.rn.f32"] < 1.2 * numbers
    assert found.total() <= most * numbers
