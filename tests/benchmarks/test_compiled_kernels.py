"""All kernels through the machine's compiler: none is forgotten, and what one refuses is told whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from click.testing import CliRunner
from support.kernels.emulated import emulated, needs_emulator

from benchmarks.__main__ import main
from benchmarks.kernels import compiled_kernels
from benchmarks.kernels.compiled_kernels import compile_all, trial_kinds
from benchmarks.launches.models import published
from mlxinfer.cache.attention import trial as attention
from mlxinfer.cache.kv_format import KVFormat
from mlxinfer.kernels_metal.executors import run_with
from mlxinfer.kernels_metal.kernel_trial import TRIALS, KernelTrial, Kind
from mlxinfer.kernels_metal.source import all_kernels
from mlxinfer.nn import few_row_experts, small_batch_matmul

MODELS = ("qwen2.5", "mixtral")
"""Many query heads for a KV head, and experts."""


def few_kinds() -> list[tuple[KernelTrial, Kind]]:
    """The first kind of each trial that these models request, with a quantized cache; of products, that of each format of codes, and of one
    row; of experts, that of each format."""
    kinds = trial_kinds([published()[name] for name in MODELS], [KVFormat(4, 4)])
    chosen = {trial.name: (trial, kind) for trial, kind in reversed(kinds)}
    products = {(kind[0].mode, *kind[3:]): (trial, kind) for trial, kind in reversed(kinds) if trial is small_batch_matmul.TRIAL}
    experts = {kind[0].into.mode: (trial, kind) for trial, kind in reversed(kinds) if trial is few_row_experts.TRIAL}
    several = [products[mode,] for mode in ("affine", "mxfp4", "Q8_0")]
    return [*chosen.values(), *several, *(products[mode, "wide"] for mode in ("affine", "mxfp4")), *experts.values()]


@needs_emulator
@pytest.mark.long
def test_every_kernel_is_compiled() -> None:
    told: list[str] = []
    with emulated():
        variants, obstacles = compile_all(few_kinds(), told.append)
    assert obstacles == []
    assert [v.error for v in variants if v.error] == []
    assert {v.kernel for v in variants} == set(all_kernels())
    assert len(told) == len(variants)


def test_every_trial_is_run() -> None:
    """A new trial for which no published model asks needs kinds in `trial_kinds`."""
    kinds = trial_kinds(published().values(), [KVFormat(), KVFormat(4, 4)])
    names = {trial.name for trial in [*TRIALS, attention.DECODE_TRIAL, attention.PREFILL_TRIAL]}
    assert {trial.name for trial, _ in kinds} >= names
    assert {trial.name for trial, _ in kinds[: len(names)]} == names, "trials take turns"
    assert len({kind for trial, kind in kinds if trial is attention.DECODE_TRIAL}) > 20
    assert not attention.DECODE_TRIAL.verdicts


TEXT = "program_source:93:12: error: call to implicitly-deleted default constructor of 'Answer'\n" + "note: " * 1000


def refusing(name: str, refused: str) -> Callable[..., list[mx.array]]:
    """A kernel that computes nothing, and one that no compiler takes."""

    def call(*, output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
        if name == refused:
            raise RuntimeError(TEXT)
        return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

    return call


def test_what_is_refused_is_told_whole_and_the_rest_goes_on() -> None:
    with run_with(lambda *, name, **_: refusing(name, "paged_attention_decode")):
        done = CliRunner().invoke(main, ["kernels-compile", "--model", "qwen2.5", "--kv", "4"])
    assert done.exit_code == 1
    assert done.output.count(TEXT) == len(decode_lines(done.output))
    lines = decode_lines(done.output)
    assert lines
    assert all(line.startswith("refused") for line in lines)
    for kernel in ("paged_attention_prefill", "append_rows", "unseal_pages", "add_norm", "affine_matmul", "sampling_blocks"):
        assert f" s  {kernel} " in done.output, kernel
    assert "plain MLX instead of attention: " in done.output


def decode_lines(output: str) -> list[str]:
    """The lines of the decode kernel that are told while the command runs."""
    return [line for line in output.splitlines() if " s  paged_attention_decode " in line and not line.endswith(":")]


def test_a_model_that_is_not_published_is_named() -> None:
    done = CliRunner().invoke(main, ["kernels-compile", "--model", "llama-9"])
    assert done.exit_code == 1
    assert "llama-9: not among the published configs llama-3.1" in done.output


def test_where_no_kernel_runs_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_kernels.executors, "current_maker", lambda: None)
    done = CliRunner().invoke(main, ["kernels-compile", "--model", "smollm2"])
    assert done.exit_code == 1
    assert "Metal kernels need an Apple GPU" in done.output
