"""The benchmark of attention on a GPU. Without a GPU it runs in the emulator, where only its results count."""

from __future__ import annotations

import mlx.core as mx
import pytest
from click import ClickException
from click.testing import CliRunner
from support.kernels.emulated import emulated, needs_emulator

from benchmarks.__main__ import main
from benchmarks.kernels import attention_gpu
from benchmarks.kernels.attention_gpu import Pages, measure, measure_prefill
from mlxinfer.cache.kv_format import KVFormat


@pytest.mark.skipif(mx.metal.is_available() or mx.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_what_it_needs() -> None:
    done = CliRunner().invoke(main, ["attention-gpu"])
    assert done.exit_code == 1
    assert "an Apple GPU, or an NVIDIA GPU and MLX for it" in done.output
    assert "Traceback" not in done.output


@pytest.mark.long
@needs_emulator
def test_all_ways_are_measured_and_right() -> None:
    with emulated():
        results = measure((4, 2, 64), 128, 2, samples=1, layers=2)
    assert [r.name for r in results] == [
        *("MLX, bfloat16", "mlx-lm, 8 bits", "mlx-lm, 4 bits"),
        *("mlxinfer, 16 bits", "mlxinfer, 8 bits", "mlxinfer, k8v4", "mlxinfer, 4 bits"),
    ]
    assert results[0].bytes == 2 * 2 * 2 * 128 * 64 * 2
    assert results[3].bytes == results[0].bytes + 2 * 2 * 64 * 64 * 2
    assert results[6].bytes < 0.3 * results[0].bytes + 2 * 2 * 64 * 64 * 2


@needs_emulator
def test_a_kernel_with_wrong_results_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_gpu, "paged_attention_decode", lambda q, *rest, **options: q)
    with pytest.raises(ClickException, match="answers differ by"):
        measure((4, 2, 64), 128, 1, samples=1, layers=2)


@pytest.mark.long
@needs_emulator
def test_prefill_is_measured_at_every_format() -> None:
    with emulated():
        results = measure_prefill((2, 1, 64), 64, 64, samples=1)
    assert [name for name, _, _ in results] == ["MLX, bfloat16", "mlxinfer, 16", "mlxinfer, 8", "mlxinfer, k8v4", "mlxinfer, 4"]
    assert {work for _, _, work in results} == {2 * 2 * 64 * 64 * 96}


def test_pages_are_scattered_and_counted_in_bytes() -> None:
    pages = Pages((4, 2, 64), KVFormat(4, 4), 640, 2, layers=1)
    ids = pages.plan.table.tolist()
    assert sorted(ids) == list(range(20))
    assert ids != list(range(20))
    assert pages.bytes == sum(a.nbytes for a in pages.layers[0][0]) + 2 * 2 * 64 * 64 * 2
    assert pages.q.dtype == mx.bfloat16
